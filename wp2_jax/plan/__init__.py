"""What a program needs on chips that are not here: compiled ahead of time, nothing runs."""
