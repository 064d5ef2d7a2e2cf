"""How models write tool calls: a class per format, named in ``FORMATS``."""

from specdec_fast.server.tool_calls.formats.base import Taken, Tool, ToolCall, ToolFormat
from specdec_fast.server.tool_calls.formats.harmony import HarmonyFormat
from specdec_fast.server.tool_calls.formats.registry import FORMATS, format_of_template

__all__ = ["FORMATS", "HarmonyFormat", "Taken", "Tool", "ToolCall", "ToolFormat", "format_of_template"]
