"""How the page calls the models: one call at a time, the newest request first, mistakes in a sentence."""

import functools
import sys
from collections.abc import Callable

import gradio as gr
from gradio.state_holder import SessionState

from trainkit_gka.cli import UserError

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


class Page(gr.Blocks):
    """Blocks that accept what somebody types into a slider's box, and report other values that do not fit in a line."""

    async def preprocess_data(self, block_fn, inputs, state, explicit_call=False):
        """Values for an event's function from what a browser sent. Raises gr.Error for values that do not fit."""
        state = state or SessionState(self)
        try:
            inputs = [_inside(state, part, value) for part, value in zip(block_fn.inputs, inputs, strict=True)]
            return await super().preprocess_data(block_fn, inputs, state, explicit_call)
        except Exception as error:  # Gradio prints a traceback for each, and only hand-made requests get here
            print(f"refused a request with a value that does not fit: {type(error).__name__}", file=sys.stderr)
            raise gr.Error("A value does not fit the page; reload it.", print_exception=False) from None


def _inside(state, part, value):
    """Of a slider the nearest number that it has; its start while its box is empty or holds a minus sign alone."""
    if not isinstance(part, gr.Slider):
        return value
    if part._id in state:  # its ends may be others by now
        part = state[part._id]
    if not isinstance(value, (int, float)):
        return part.value
    return min(part.maximum, max(part.minimum, value))
