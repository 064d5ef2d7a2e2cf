"""More than a hundred JSON schemas of everyday things, by name; every keyword that is served occurs."""

from __future__ import annotations


def thing(required=True, **properties):
    """An object with these properties, all of which are required unless ``required`` is False."""
    return {"type": "object", "properties": properties, "required": list(properties) if required else []}


def one_of(*values):
    return {"enum": list(values)}


def text(most=12, **more):
    return {"type": "string", "maxLength": most, **more}


def number(least, most):
    return {"type": "integer", "minimum": least, "maximum": most}


def many(items, most=3, least=0):
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


FLAG = {"type": "boolean"}
NONE = {"type": "null"}
CLOSED = {"additionalProperties": False}
PLANETS = ("Mercury", "Venus", "Earth", "Mars", "Jupiter", "Saturn", "Uranus", "Neptune")
METALS = ("gold", "silver", "copper", "iron", "tin", "lead", "mercury")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
)
POINTS = ("north", "east", "south", "west")

SCHEMAS = {
    # single values
    "true or false": FLAG,
    "nothing": NONE,
    "a planet": one_of(*PLANETS),
    "a metal": one_of(*METALS),
    "a day": one_of(*DAYS),
    "a month by number": number(1, 12),
    "moons of Mars": {"const": 2},
    "a leap year or not": {"const": "leap"},
    "a mixed list of values": one_of(1, "one", None, True, [1, 2], {"a": 1}),
    "degrees below zero": number(-273, -1),
    "a hundred": {"type": "integer", "minimum": 100, "maximum": 100},
    "an even number": {"type": "integer", "multipleOf": 2},
    "pH": {"type": "number", "minimum": 0, "maximum": 14},
    "a probability": {"type": "number", "minimum": 0, "maximum": 1},
    "an open interval": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    "a number between": {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 6},
    "a short word": text(5, minLength=2),
    "a letter": {"type": "string", "pattern": "^[a-z]$"},
    "an element": {"type": "string", "pattern": "^[A-Z][a-z]?$"},
    "a colour": {"type": "string", "pattern": "^#[0-9a-f]{6}$"},
    "a plate": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    "a clock time": {"type": "string", "pattern": "^([01][0-9]|2[0-3]):[0-5][0-9]$"},
    "a date": {"type": "string", "format": "date"},
    "a moment": {"type": "string", "format": "date-time"},
    "an address of version 4": {"type": "string", "format": "ipv4"},
    "an identifier": {"type": "string", "format": "uuid"},
    "a word or nothing": {"type": ["string", "null"], "maxLength": 6},
    "a count or a word": {"anyOf": [number(0, 9), text(4)]},
    "quotes in values": one_of('say "yes"', "back\\slash", "line\nend", "tab\there"),
    "letters of other alphabets": one_of("é", "ß", "日本", "Ω", "😀"),
    # lists
    "compass": many(one_of(*POINTS), 4),
    "three planets": many(one_of(*PLANETS), 3, 3),
    "dice": many(number(1, 6), 5, 2),
    "flags": many(FLAG, 3),
    "nothings": many(NONE, 2),
    "an empty list": {"type": "array", "maxItems": 0},
    "words": many(text(4), 2),
    "a grid": many(many(number(0, 1), 2, 2), 2, 2),
    "a pair": {"type": "array", "prefixItems": [one_of(*METALS), number(1, 118)], "items": False, "minItems": 2},
    "a head and a tail": {
        "type": "array",
        "prefixItems": [one_of("sum")],
        "items": number(0, 9),
        "minItems": 2,
        "maxItems": 4,
    },
    "mixed list": many({"anyOf": [number(0, 9), FLAG, NONE]}, 3),
    # objects of one level
    "a planet's moons": thing(planet=one_of(*PLANETS), moons=number(0, 300)),
    "an atom": thing(symbol={"type": "string", "pattern": "^[A-Z][a-z]?$"}, protons=number(1, 118), metal=FLAG),
    "a river": thing(name=text(), kilometres=number(1, 7000)),
    "a mountain": thing(name=text(), metres=number(1, 8849)),
    "a city": thing(name=text(), capital=FLAG, country=text(8)),
    "a book": thing(title=text(16), year=number(1450, 2025), pages=number(1, 2000)),
    "a person": thing(name=text(), age=number(0, 120)),
    "an animal": thing(kind=one_of("cat", "dog", "owl"), legs=one_of(2, 4), wild=FLAG),
    "a song": thing(title=text(), minutes={"type": "number", "minimum": 0, "maximum": 20}),
    "a shape": thing(sides=number(3, 12), regular=FLAG),
    "a card": thing(suit=one_of("clubs", "diamonds", "hearts", "spades"), rank=number(1, 13)),
    "a chess square": thing(file={"type": "string", "pattern": "^[a-h]$"}, rank=number(1, 8)),
    "a chess move": thing(piece=one_of("K", "Q", "R", "B", "N", "P"), to={"type": "string", "pattern": "^[a-h][1-8]$"}),
    "a triangle": thing(a=number(1, 9), b=number(1, 9), c=number(1, 9)),
    "a date in parts": thing(year=number(1, 9999), month=number(1, 12), day=number(1, 31)),
    "weather": thing(sky=one_of("clear", "cloudy", "rain"), celsius=number(-60, 60)),
    "a train": thing(number={"type": "string", "pattern": "^IC [0-9]{3}$"}, late=FLAG),
    "an egg timer": thing(minutes=number(1, 12), soft=FLAG),
    "a tide": thing(high=FLAG, metres={"type": "number", "minimum": -1, "maximum": 16}),
    "a vote": thing(answer=one_of("yes", "no", "abstain")),
    "a gas": thing(name=one_of("helium", "neon", "argon"), noble={"const": True}),
    "a key with quotes": {
        "type": "object",
        "properties": {'a "b"\\': number(0, 9), "": FLAG},
        "required": ["", 'a "b"\\'],
    },
    "a key of another alphabet": thing(**{"größe": number(1, 9), "日": one_of("月")}),
    "no properties": {"type": "object", **CLOSED},
    "all optional": thing(False, name=text(5), age=number(0, 9)),
    "one of two required": {**thing(False, a=number(0, 9), b=number(0, 9)), "required": ["b"], **CLOSED},
    "counts by word": {"type": "object", "additionalProperties": number(0, 9), "maxProperties": 2},
    "two or three counts": {"type": "object", "additionalProperties": FLAG, "minProperties": 2, "maxProperties": 3},
    "a name and more": {**thing(name=text(5)), "additionalProperties": number(0, 3), "maxProperties": 3},
    "keys of a pattern": {
        "type": "object",
        "patternProperties": {"^x[0-9]$": number(0, 9)},
        **CLOSED,
        "maxProperties": 2,
    },
    "names of keys": {
        "type": "object",
        "propertyNames": {"pattern": "^[ab]$"},
        "additionalProperties": FLAG,
        "maxProperties": 2,
    },
    # nested objects
    "an orbit": thing(body=one_of(*PLANETS), orbit=thing(days=number(1, 60000), retrograde=FLAG)),
    "a recipe": thing(dish=text(), steps=many(thing(verb=one_of("cut", "boil", "mix"), minutes=number(0, 90)), 2, 1)),
    "an atlas": thing(page=number(1, 99), places=many(thing(name=text(6), coastal=FLAG), 2)),
    "a timetable": thing(day=one_of(*DAYS), lessons=many(one_of("music", "history", "chemistry"), 3)),
    "an order": thing(items=many(thing(what=one_of("tea", "cake"), count=number(1, 9)), 2, 1), paid=FLAG),
    "a route": thing(start=thing(x=number(-9, 9), y=number(-9, 9)), end=thing(x=number(-9, 9), y=number(-9, 9))),
    "a house": thing(floors=many(thing(rooms=number(1, 9), lift=FLAG), 2, 1)),
    "an alloy": thing(
        name=one_of("bronze", "brass"), parts=many(thing(metal=one_of(*METALS), percent=number(1, 99)), 2, 2)
    ),
    "three levels": thing(a=thing(b=thing(c=one_of("deep")))),
    "a family": thing(name=text(6), pets=many(thing(name=text(5), kind=one_of("cat", "dog")), 2)),
    "a library": thing(open=FLAG, shelves=many(many(text(4), 1, 1), 2)),
    "a matrix": thing(rows=many(many(number(0, 9), 2, 2), 2, 2)),
    "a league": thing(teams=many(thing(name=text(5), points=number(0, 99)), 2, 2)),
    "a calendar": thing(month=one_of(*MONTHS), notes=many(thing(day=number(1, 31), note=text(6)), 2)),
    "a survey": thing(
        answers=many(one_of("agree", "disagree", "unsure"), 4, 2), remarks={"type": ["string", "null"], "maxLength": 8}
    ),
    "a sample": thing(
        label={"type": "string", "pattern": "^S-[0-9]{2}$"},
        values=many({"type": "number", "minimum": 0, "maximum": 9}, 3, 1),
    ),
    # references
    "a reference": {"$ref": "#/$defs/planet", "$defs": {"planet": one_of(*PLANETS)}},
    "definitions of old": {"$ref": "#/definitions/day", "definitions": {"day": one_of(*DAYS)}},
    "a point twice": {**thing(a={"$ref": "#/$defs/p"}, b={"$ref": "#/$defs/p"}), "$defs": {"p": thing(x=number(0, 9))}},
    "a property again": thing(a=number(1, 5), b={"$ref": "#/properties/a"}),
    "a list of references": {
        "type": "array",
        "items": {"$ref": "#/$defs/m"},
        "maxItems": 3,
        "$defs": {"m": one_of(*METALS)},
    },
    "a chain of references": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": number(7, 9)}},
    "a tree": {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": thing(value=number(0, 9), left={"anyOf": [{"$ref": "#/$defs/node"}, NONE]}),
        },
    },
    "a linked list": {
        "$ref": "#/$defs/n",
        "$defs": {"n": thing(v=one_of("a", "b"), next={"anyOf": [NONE, {"$ref": "#/$defs/n"}]})},
    },
    "a thread of comments": {**thing(text=text(5), replies=many({"$ref": "#"}, 1))},
    "a described reference": {"$ref": "#/$defs/x", "description": "a digit", "$defs": {"x": number(0, 9)}},
    # choices between schemas
    "a circle or a square": {
        "anyOf": [
            thing(kind={"const": "circle"}, radius=number(1, 9)),
            thing(kind={"const": "square"}, side=number(1, 9)),
        ]
    },
    "exactly one shape": {
        "oneOf": [
            thing(kind={"const": "circle"}, radius=number(1, 9)),
            thing(kind={"const": "square"}, side=number(1, 9)),
        ]
    },
    "exactly one type": {"oneOf": [{"type": "string", "maxLength": 3}, number(0, 9), FLAG]},
    "exactly one by reference": {
        "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
        "$defs": {
            "cat": thing(kind={"const": "cat"}, lives=number(1, 9)),
            "dog": thing(kind={"const": "dog"}, tricks=number(0, 9)),
        },
    },
    "all of one": {"allOf": [thing(name=text(5))]},
    "an optional part": thing(name=text(5), note={"anyOf": [text(5), NONE]}),
    "a result or an error": {
        "anyOf": [thing(ok={"const": True}, value=number(0, 99)), thing(ok={"const": False}, why=text(8))]
    },
    "numbers or words": many({"anyOf": [number(0, 9), one_of("zero", "nine")]}, 3, 1),
    "types in a list": {"type": ["integer", "boolean", "null"]},
    "an object or a list": {"anyOf": [thing(a=FLAG), many(FLAG, 2)]},
    # annotations, which change nothing
    "annotated": {"title": "T", "description": "d", "$comment": "c", "examples": [1], "default": 3, **number(1, 5)},
    "an annotated object": {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Egg",
        **thing(size=one_of("S", "M")),
    },
    "unknown keywords": {"type": "boolean", "x-order": 3, "nullable": False},
    "any value with a limit": thing(value={"anyOf": [number(0, 9), text(3), NONE, FLAG]}),
}
