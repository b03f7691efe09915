"""Running a model's own Jinja chat template while tracing the origin of every printed character."""

from renderers.template.chat_template import ChatTemplate, Printed, Segment
from renderers.template.traced import Origin, TracedStr

__all__ = ["ChatTemplate", "Origin", "Printed", "Segment", "TracedStr"]
