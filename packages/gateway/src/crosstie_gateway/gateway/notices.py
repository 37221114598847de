"""What the gateway tells its operator: a sentence for people that also knows its event, level and fields."""

from typing import Literal, Self

Level = Literal["info", "warning", "error"]
# What a field of a notice may be. (A bool is an int to Python, and not to those who read JSON.)
Field = str | int | float | bool


class Notice(str):
    """It is its sentence, for those who want no more."""

    event: str
    level: Level
    fields: dict[str, Field]

    def __new__(cls, event: str, level: Level, sentence: str, **fields: Field) -> Self:
        notice = super().__new__(cls, sentence)
        notice.event, notice.level, notice.fields = event, level, fields
        return notice
