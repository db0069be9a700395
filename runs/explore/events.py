"""How the page calls the models: one call at a time, the newest request first, mistakes in a sentence."""

import functools
from collections.abc import Callable

import gradio as gr

from trainkit.cli import UserError

# All events wait in one queue for one worker, and none of them is offered to programs.
ONE_AT_A_TIME = dict(concurrency_id="models", concurrency_limit=1, api_visibility="private")
WHILE_CHANGING = dict(trigger_mode="always_last", show_progress="hidden", **ONE_AT_A_TIME)


def plain(function: Callable) -> Callable:
    """The function, which shows a UserError on the page and then leaves everything else there as it is."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        try:
            return function(*args, **kwargs)
        except UserError as error:
            words = str(error)
            gr.Warning(f"{words[0].upper()}{words[1:]}.", title="")
            return gr.skip()

    return call
