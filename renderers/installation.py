"""The command that installs an extra of mmrollouts beside the installed one."""


def install_command(extra: str) -> str:
    """The `pip install` command of an extra, or of several with commas between them, for a shell.

    pip finds mmrollouts installed, from an index or a checkout, and adds what the extra needs.
    """
    return f'pip install "mmrollouts[{extra}]"'
