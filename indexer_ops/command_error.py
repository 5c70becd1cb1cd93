"""What a sub-command raises when it cannot go on for a reason its user can act on."""


class CommandError(Exception):
    """The command line shows the message as one line, without a traceback."""
