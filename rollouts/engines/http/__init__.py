"""The engines over HTTP share requests to a server, running requests, files of media, checks of prompts."""
