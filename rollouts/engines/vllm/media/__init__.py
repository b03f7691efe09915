"""Which media a request holds, and in which form they are sent."""
