"""Prompts: what the policy is told, and how its answer is read.

Two contexts. A *conversation* grows: the first message gives the task, each later one the new
observation. A *window* is one fresh prompt per step with the last few observations and actions.
The hindsight form of either replaces the task by "reach this exact observation" (RELACE,
Appendix D.3).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

import jinja2

_ACTION = re.compile(r"<action>(.*?)</action>", re.DOTALL)
_THINK = re.compile(r"<think>.*?</think>", re.DOTALL)

_JINJA = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)


def scene(first_observation: str) -> str:
    """The room of an episode's first observation, without ALFWorld's banner and task line."""
    text = first_observation.partition("Your task is to:")[0]
    return text.replace("-= Welcome to TextWorld, ALFRED! =-", "").strip()


@dataclasses.dataclass(frozen=True)
class Template:
    """Texts of a prompt, as Jinja sources.

    ``opening`` and ``window`` see: goal, scene, observation, admissible, history (pairs of
    observation and action), step, think, show_admissible. ``turn`` sees observation, admissible,
    show_admissible. ``reminder`` answers a reply without an action.
    """

    system: str
    opening: str
    turn: str
    window: str
    reminder: str
    hindsight_goal: str


_RULES = """\
You act in a text household. Each message shows what you observe; you answer with one action.
{% if think %}
Answer in this form, with a short thought of your own:
<think>A lettuce is kept cold, so the fridge comes first.</think><action>go to fridge 1</action>
{% else %}
Answer in this form, and write nothing else:
<action>go to fridge 1</action>
{% endif %}"""

_ASK = """\
{% if show_admissible %}

Possible actions:
{% for action in admissible %}
- {{ action }}
{% endfor %}
{% endif %}

Which {% if show_admissible %}of these actions{% else %}action{% endif %} do you take? \
Give {% if think %}a short thought inside <think></think>, then {% endif %}\
one action inside <action></action>."""

_SCIENCE_RULES = """\
You act in a text world of science. Each message shows what you observe; you answer with one \
action. OBJ stands for an object, written as the world writes it.
- look around, look at OBJ, look in OBJ, read OBJ, inventory, task (your task once more)
- go to PLACE, teleport to PLACE (if the world allows it), open OBJ, close OBJ
- pick up OBJ, put down OBJ, move OBJ to OBJ, pour OBJ into OBJ, dunk OBJ into OBJ, mix OBJ
- activate OBJ, deactivate OBJ, use OBJ, use OBJ on OBJ, connect OBJ to OBJ, disconnect OBJ
- eat OBJ, flush OBJ, wait (ten turns), wait1 (one turn)
- focus on OBJ: says which object your task is about. A wrong one ends the task: you fail.
If an action fits several objects, the answer is a numbered list: your next action is a number.
{% if think %}
Answer in this form, with a short thought of your own:
<think>I need to measure first.</think><action>pick up thermometer</action>
{% else %}
Answer in this form, and write nothing else:
<action>pick up thermometer</action>
{% endif %}"""

_LIST = "{% if show_admissible %} {{ admissible | join(', ') }}{% endif %}"

TEMPLATES: dict[str, Template] = {
    "household": Template(
        system=_RULES,
        opening="{{ scene }}\n\nYour task is to: {{ goal }}" + _ASK,
        turn="{{ observation }}" + _ASK,
        window="""\
Your task is to: {{ goal }}
{% if history %}

You have taken {{ step }} steps. The latest observations, and what you did at each:
{% for seen, done in history %}
- {{ seen }} -> {{ done }}
{% endfor %}
{% endif %}

Now you observe: {{ observation }}"""
        + _ASK,
        reminder="No action was found in your answer.",
        hindsight_goal="reach exactly this observation: {{ final }}",
    ),
    # The goal is a sentence of its own: "Your task is to boil water. ..."
    "scienceworld": Template(
        system=_SCIENCE_RULES,
        opening="{{ goal }}\n\n{{ scene }}" + _ASK,
        turn="{{ observation }}" + _ASK,
        window="""\
{{ goal }}
{% if history %}

You have taken {{ step }} steps. The latest observations, and what you did at each:
{% for seen, done in history %}
Observation: {{ seen }}
Action: {{ done }}
{% endfor %}
{% endif %}

Now you observe: {{ observation }}"""
        + _ASK,
        reminder="No action was found in your answer.",
        hindsight_goal="Your task is to reach exactly this observation: {{ final }}",
    ),
    # For policies trained from scratch: no instruction, only what changes.
    "bare": Template(
        system="",
        opening="{{ scene }} Your task is to: {{ goal }}" + _LIST,
        turn="{{ observation }}" + _LIST,
        window="""\
Your task is to: {{ goal }}
{% for seen, done in history %}
{{ seen }} {{ done }}
{% endfor %}
{{ observation }}"""
        + _LIST,
        reminder="Nothing happens.",
        hindsight_goal="{{ final }}",
    ),
}


@dataclasses.dataclass(frozen=True)
class Prompt:
    """How a run talks to its policy.

    Attributes:
      template: name in ``TEMPLATES``.
      context: "conversation" or "window".
      history: pairs shown in a window.
      think: ask for (and require) a <think> block.
      show_admissible: list the admissible actions.
    """

    template: str = "household"
    context: str = "conversation"
    history: int = 2
    think: bool = True
    show_admissible: bool = True

    def __post_init__(self) -> None:
        if self.template not in TEMPLATES:
            raise ValueError(
                f"prompt.template={self.template!r}: expected one of {', '.join(TEMPLATES)}"
            )
        if self.context not in ("conversation", "window"):
            raise ValueError(
                f"prompt.context={self.context!r}: expected 'conversation' or 'window'"
            )

    def opening(self, goal: str, scene: str, admissible: Sequence[str]) -> list[Mapping[str, str]]:
        """Messages that begin a conversation."""
        return self._messages("opening", goal=goal, scene=scene, admissible=admissible)

    def window(
        self,
        goal: str,
        history: Sequence[tuple[str, str]],
        observation: str,
        admissible: Sequence[str],
        step: int,
    ) -> list[Mapping[str, str]]:
        """Messages of one windowed step."""
        return self._messages(
            "window",
            goal=goal,
            history=list(history)[-self.history :] if self.history else [],
            observation=observation,
            admissible=admissible,
            step=step,
        )

    def turn(self, observation: str, admissible: Sequence[str]) -> str:
        """Text of a later message of a conversation."""
        return self._render("turn", observation=observation, admissible=admissible)

    @property
    def reminder(self) -> str:
        """Observation that answers a reply without an action."""
        return TEMPLATES[self.template].reminder

    def hindsight_goal(self, final: str) -> str:
        """The task as seen afterwards: reach the observation that was reached."""
        return self._render("hindsight_goal", final=final)

    def action(self, text: str) -> str | None:
        """The action of a reply, or None if the format is broken.

        The reply must hold exactly one action, after its thinking where thinking is asked for.
        """
        if self.think:
            thought = _THINK.search(text)
            if thought is None:
                return None
            text = text[thought.end() :]
        found = _ACTION.findall(text)
        if len(found) != 1 or not found[0].strip():
            return None
        return " ".join(found[0].split())

    def reply(self, action: str) -> str:
        """A well-formed reply, as a demonstration gives it."""
        think = "<think> </think>" if self.think else ""
        return f"{think}<action> {action} </action>"

    def _messages(self, part: str, **values: object) -> list[Mapping[str, str]]:
        user = {"role": "user", "content": self._render(part, **values)}
        system = self._render("system")
        return [{"role": "system", "content": system}, user] if system else [user]

    def _render(self, part: str, **values: object) -> str:
        source = getattr(TEMPLATES[self.template], part)
        return (
            _JINJA.from_string(source)
            .render(think=self.think, show_admissible=self.show_admissible, **values)
            .strip()
        )
