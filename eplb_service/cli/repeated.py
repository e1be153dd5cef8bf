"""An option given twice is a mistake that is answered, not one that silently keeps the last value."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

SEVERAL = "VALUE,..."
"""What help shows for the value of an option that takes several, with commas between."""


def check_repeated(command: Any, ctx: Any, arguments: Sequence[str]) -> None:
    """Refuse arguments that give an option of ``command`` more than once.

    Options that may be given again are left alone, and switches that have no opposite.

    Raises
    ------
    click.UsageError
        Naming the option, and how several values are written where it takes several.
    """
    *_, given = command.make_parser(ctx).parse_args(args=list(arguments))
    for option, times in Counter(given).items():
        if times < 2 or option.param_type_name != "option" or option.multiple or option.count:
            continue
        if option.is_flag and not option.secondary_opts:
            continue
        flag = "/".join([*option.opts, *option.secondary_opts])
        several = (option.metavar or "").endswith(",...")
        ctx.fail(
            f"{flag} is given {'twice' if times == 2 else f'{times} times'}; "
            + ("write its values with commas between them" if several else "give it once")
        )
