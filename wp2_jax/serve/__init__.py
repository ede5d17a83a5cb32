"""Worlds to play: the engine that makes them in turns, its protocol, a server, a client and the page.

`world` (what a world is told and what was made) -> `engine` (turns, in a thread of its own) -> `server`; `protocol`
says what goes over the wire and is all that a client shares with it.
"""
