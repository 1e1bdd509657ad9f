"""Messages to tokens and back: chat templates, tool-call formats, streams of replies. No torch."""

from honed.text.renderer import Renderer, load_renderer
from honed.text.stream import ReplyStream

__all__ = ["Renderer", "ReplyStream", "load_renderer"]
