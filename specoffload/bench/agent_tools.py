"""The tools that `bench --agent` offers, and the small world that they change. Pure.

The world is made up: files, rooms, a calendar and a shop are plain data, so that each task begins
in the same state and no call touches the machine. A tool's fields are its arguments, and pydantic
makes its schema of them and checks the calls by it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict

Day = Literal["Monday", "Tuesday", "Wednesday", "Thursday", "Friday"]
RoomName = Literal["kitchen", "hall", "bedroom"]

_SHAPES = """def area(width, height):
    return width * height


def volume(width, height, depth):
    return area(width, height) * depth
"""
_STACK = """class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)
"""


def _files() -> dict[str, str]:
    return {
        "calc.py": "def add(a, b):\n    return a - b\n",
        "config.ini": "[server]\nhost = localhost\nport = 8080\n",
        "notes.txt": "milk: 2 litres\neggs: 12\nrice: 500 g\n",
        "old.log": "started\nstopped\n",
        "shapes.py": _SHAPES,
        "stack.py": _STACK,
    }


@dataclass
class HomeRoom:
    """A room of the world. `celsius` is what its heating is set to."""

    has_light: bool
    celsius: int = 18


def _rooms() -> dict[str, HomeRoom]:
    return {"kitchen": HomeRoom(False), "hall": HomeRoom(True), "bedroom": HomeRoom(True)}


def _calendar() -> dict[str, dict[str, str]]:
    """Titles by day and time."""
    return {
        "Monday": {"09:00": "planning"},
        "Wednesday": {"14:00": "review"},
        "Thursday": {"12:30": "lunch with Ana"},
    }


# Prices in cents by id of the product.
PRODUCTS: Mapping[str, tuple[str, int]] = {
    "p1": ("pencil, red", 120),
    "p2": ("pencil, blue", 95),
    "p3": ("pencil, green", 140),
    "n1": ("notebook", 350),
}


@dataclass
class AgentWorld:
    """All that calls can change. `answer` is what the model submitted, or None."""

    files: dict[str, str] = field(default_factory=_files)
    rooms: dict[str, HomeRoom] = field(default_factory=_rooms)
    calendar: dict[str, dict[str, str]] = field(default_factory=_calendar)
    orders: dict[str, int] = field(default_factory=dict)  # pieces by id of the product
    answer: str | None = None


class AgentTool(BaseModel):
    """A call of a tool. The docstring of each subclass is what a model is told about the tool."""

    model_config = ConfigDict(extra="forbid", strict=True)
    name: ClassVar[str]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.name = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()

    def run(self, world: AgentWorld) -> str:
        """Change `world`, and return what the model is told."""
        raise NotImplementedError

    @classmethod
    def described(cls) -> dict[str, Any]:
        """The tool in the form of OpenAI's API."""
        schema = cls.model_json_schema()
        properties = {
            name: {key: value for key, value in said.items() if key != "title"}
            for name, said in schema["properties"].items()
        }
        parameters = {
            "type": "object", "properties": properties, "required": list(properties),
            "additionalProperties": False,
        }  # fmt: skip
        function = {"name": cls.name, "description": cls.__doc__, "parameters": parameters}
        return {"type": "function", "function": function}


class SubmitAnswer(AgentTool):
    """Submit the final answer. It ends the task."""

    answer: str

    def run(self, world: AgentWorld) -> str:
        world.answer = self.answer
        return "submitted"


class SearchFiles(AgentTool):
    """List the names of the files that contain a text. An empty text lists all files."""

    text: str

    def run(self, world: AgentWorld) -> str:
        names = [name for name, content in world.files.items() if self.text in content]
        return "\n".join(names) or "no file contains it"


class ReadFile(AgentTool):
    """Return the content of a file."""

    path: str

    def run(self, world: AgentWorld) -> str:
        return world.files.get(self.path, f"error: there is no file {self.path}")


class WriteFile(AgentTool):
    """Write a file. It replaces a file of the same name."""

    path: str
    content: str

    def run(self, world: AgentWorld) -> str:
        world.files[self.path] = self.content
        return "written"


class ReplaceInFile(AgentTool):
    """Replace each occurrence of a text in a file by another text."""

    path: str
    old: str
    new: str

    def run(self, world: AgentWorld) -> str:
        content = world.files.get(self.path)
        if content is None:
            return f"error: there is no file {self.path}"
        if not self.old or self.old not in content:
            return "error: the file does not contain the old text"
        world.files[self.path] = content.replace(self.old, self.new)
        return "replaced"


class DeleteFile(AgentTool):
    """Delete a file."""

    path: str

    def run(self, world: AgentWorld) -> str:
        content = world.files.pop(self.path, None)
        return f"error: there is no file {self.path}" if content is None else "deleted"


class ReadRoom(AgentTool):
    """Tell the state of a room's light and heating."""

    room: RoomName

    def run(self, world: AgentWorld) -> str:
        room = world.rooms[self.room]
        return f"light {'on' if room.has_light else 'off'}, heating {room.celsius} degrees"


class SetLight(AgentTool):
    """Switch the light of a room on or off."""

    room: RoomName
    on: bool

    def run(self, world: AgentWorld) -> str:
        world.rooms[self.room].has_light = self.on
        return "done"


class SetHeating(AgentTool):
    """Set the heating of a room to whole degrees Celsius."""

    room: RoomName
    celsius: int

    def run(self, world: AgentWorld) -> str:
        world.rooms[self.room].celsius = self.celsius
        return "done"


class Calculate(AgentTool):
    """Compute a sum, a difference, a product or a quotient of two numbers."""

    a: float
    operator: Literal["+", "-", "*", "/"]
    b: float

    def run(self, world: AgentWorld) -> str:
        match self.operator:
            case "+":
                return f"{self.a + self.b:.15g}"
            case "-":
                return f"{self.a - self.b:.15g}"
            case "*":
                return f"{self.a * self.b:.15g}"
            case "/":
                return f"{self.a / self.b:.15g}" if self.b else "error: division by zero"


class ReadDay(AgentTool):
    """List the events of a day, with their times."""

    day: Day

    def run(self, world: AgentWorld) -> str:
        events = sorted(world.calendar.get(self.day, {}).items())
        return "\n".join(f"{time} {title}" for time, title in events) or "no events"


class AddEvent(AgentTool):
    """Add an event to the calendar. The time has the form HH:MM."""

    day: Day
    time: str
    title: str

    def run(self, world: AgentWorld) -> str:
        if not re.fullmatch("([01][0-9]|2[0-3]):[0-5][0-9]", self.time):
            return "error: the time must have the form HH:MM"
        world.calendar.setdefault(self.day, {})[self.time] = self.title
        return "added"


class FindProducts(AgentTool):
    """List the products whose names contain a word, with their ids and prices."""

    word: str

    def run(self, world: AgentWorld) -> str:
        products = [
            f"{key}: {name}, {cents / 100:.2f} euros"
            for key, (name, cents) in PRODUCTS.items()
            if self.word.lower() in name
        ]
        return "\n".join(products) or "no product has this name"


class PlaceOrder(AgentTool):
    """Order some pieces of a product, by its id."""

    id: str
    quantity: int

    def run(self, world: AgentWorld) -> str:
        if self.id not in PRODUCTS:
            return f"error: there is no product {self.id}"
        if self.quantity < 1:
            return "error: the quantity must be at least 1"
        world.orders[self.id] = world.orders.get(self.id, 0) + self.quantity
        return "ordered"
