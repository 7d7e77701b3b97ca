"""The ``completion`` command: a script with which a shell completes commands, keys and choices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from lit_fedad.cli.help import Command, configuration_keys
from lit_fedad.core.config_groups import choices, config_groups

_SCRIPT = """{head}_lit_fedad() {{
  local line="${{COMP_LINE:0:COMP_POINT}}" words= COMMAND
  local cur="${{line##* }}"
  set -- ${{line% *}}
  COMMAND="${{2:-}}"
  [ $# -eq 1 ] && words="{commands}"
  case "$COMMAND" in
{cases}
  esac
  COMPREPLY=( $(compgen -W "$words" -- "$cur") )
  if [ ${{#COMPREPLY[@]}} -eq 0 ] && [ "${{cur#*=}}" != "$cur" ]; then
    COMPREPLY=( $(compgen -f -P "${{cur%%=*}}=" -- "${{cur#*=}}") )
  fi
  if [ -z "${{ZSH_VERSION:-}}" ]; then
    # bash completes what follows the last "=" alone, and adds a space to whole words.
    [ "${{cur#*=}}" != "$cur" ] && COMPREPLY=( "${{COMPREPLY[@]#*=}}" )
    case "${{COMPREPLY[*]}}" in *=) compopt -o nospace;; esac
  fi
}}
complete -F _lit_fedad lit-fedad
"""


def completion(shell: Literal["bash", "zsh"] = "bash") -> None:
    """Prints the script that completes ``lit-fedad`` in a shell.

    Args:
        shell: The shell.
    """
    from lit_fedad.cli.main import COMMANDS

    cases = "\n".join(
        f'    {name}) words="{" ".join(_words(name, command))}";;' for name, command in COMMANDS.items()
    )
    head = "autoload -U +X bashcompinit && bashcompinit\n" if shell == "zsh" else ""
    print(_SCRIPT.format(head=head, commands=" ".join(COMMANDS), cases=cases), end="")  # noqa: T201


def _words(name: str, command: Command) -> Sequence[str]:
    """Lists the words that may follow a command: first words of its forms, keys, and key=value for known values."""
    words = [word for word in command.forms if word]
    for key in dict.fromkeys(key for form in command.forms.values() for key in form.keys):
        words += [f"{key.name}={choice}" for choice in key.choices] or [f"{key.name}="]
    if name == "train":
        groups = {group: choices(group) for group in config_groups()}
        words += [f"{group}={choice}" for group, listed in groups.items() for choice in listed]
        words += [
            f"{key.name}=" for key in configuration_keys() if key.name not in groups and "." not in key.name
        ]
    return [word for word in dict.fromkeys(words) if not word.endswith(("NAME=", "KEY="))]
