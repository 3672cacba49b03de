"""Errors that are told to the user in one line."""


class UserError(Exception):
    """Something the user can put right; the message says what and how."""


class Interrupted(Exception):
    """The user stopped a command that can be resumed; the message says how."""
