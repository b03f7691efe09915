"""Running a model's own Jinja chat template while watching where every printed character came from."""

from renderers.template.chat_template import ChatTemplate, Printed, Segment
from renderers.template.traced import Origin, TracedStr

__all__ = ["ChatTemplate", "Origin", "Printed", "Segment", "TracedStr"]
