"""The one exception whose message is meant for the person at the keyboard."""


class UserError(Exception):
    """Bad input that the user can mend.

    The message is one clear line: it names the file, key or client and says what to do. The command line prints
    it without a traceback and exits with status 2.
    """
