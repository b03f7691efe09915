"""Calling the code of users, and checking, copying and quoting the values that it returns."""
