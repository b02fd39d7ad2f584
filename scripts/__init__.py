"""The headrace command, one module per sub-command, and the shell scripts of the repository."""
