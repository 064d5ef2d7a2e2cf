"""What may be asked for: accepted in every form, and refused with the place of what is wrong."""

from __future__ import annotations

import json
import pickle
from typing import Literal

import pytest
from pydantic import BaseModel

import specdec_fast as sd
from specdec_fast.structured_outputs.parameters import MOST_CHARACTERS
from support.schemas import SCHEMAS


class Pet(BaseModel):
    kind: Literal["cat", "dog"]
    name: str


class Family(BaseModel):
    pets: list[Pet]
    note: str | None = None


def test_schemas_of_every_form():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    forms = [sd.StructuredOutputs(json=form) for form in (schema, json.dumps(schema))]
    assert forms[0] == forms[1]
    assert forms[0].kind == "json"
    assert json.loads(forms[0].text) == schema
    assert json.loads(sd.StructuredOutputs(json=Family).text) == Family.model_json_schema()
    assert pickle.loads(pickle.dumps(forms[0])) == forms[0]


def test_sampling_params_take_mappings():
    params = sd.SamplingParams(structured_outputs={"choice": ["a", "b"]})
    assert params.structured_outputs == sd.StructuredOutputs(choice=("a", "b"))
    assert sd.SamplingParams(structured_outputs=params.structured_outputs) == params


def test_a_schema_is_copied():
    """The caller may change its own later."""
    schema = {"type": "object", "properties": {}}
    asked = sd.StructuredOutputs(json=schema)
    schema["properties"]["a"] = {"type": "nothing"}
    assert json.loads(asked.text)["properties"] == {}


@pytest.mark.parametrize("name", SCHEMAS)
def test_served_schemas_are_accepted(name):
    sd.StructuredOutputs(json=SCHEMAS[name])


DEFS = {"$defs": {"x": {"type": "integer"}, "loop": {"$ref": "#/$defs/loop"}}}


@pytest.mark.parametrize(
    ("schema", "place", "message"),
    [
        ({"type": "strnig"}, "#/type", "'strnig' is no type"),
        ({"type": 3}, "#/type", "3 is no type"),
        ({"properties": {"a/b": {"type": "x"}}}, "#/properties/a~1b/type", "no type"),
        ({"items": {"items": {"type": "x"}}}, "#/items/items/type", "no type"),
        ({"anyOf": [True, {"type": "x"}]}, "#/anyOf/1/type", "no type"),
        ({"$defs": {"a": {"type": "x"}}}, "#/$defs/a/type", "no type"),
        ({"patternProperties": {"a": {"type": "x"}}, "type": "object"}, "#/patternProperties/a/type", "no type"),
        (False, "#", "allows nothing"),
        ([], "#", "expected an object"),
        ({"properties": {"a": 3}}, "#/properties/a", "expected an object"),
        ({"properties": []}, "#/properties", "an object of schemas"),
        ({"not": {}}, "#/not", "not supported"),
        ({"if": {}}, "#/if", "not supported"),
        ({"type": "array", "contains": {}}, "#/contains", "not supported"),
        ({"type": "array", "uniqueItems": True}, "#/uniqueItems", "not supported"),
        ({"type": "object", "dependentRequired": {}}, "#/dependentRequired", "not supported"),
        ({"allOf": [{}, {}]}, "#/allOf", "several"),
        ({"anyOf": [{}], "type": "object"}, "#/type", "beside 'anyOf'"),
        ({"anyOf": []}, "#/anyOf", "a list of schemas"),
        ({"$ref": "#/$defs/x", "minimum": 3, **DEFS}, "#/minimum", "beside '$ref'"),
        ({"$ref": "#/$defs/y", **DEFS}, "#/$ref", "refers to nothing"),
        ({"$ref": "#/$defs/loop", **DEFS}, "#/$ref", "refers to itself"),
        ({"$ref": "#"}, "#/$ref", "refers to itself"),
        ({"$ref": "http://example.com/a.json"}, "#/$ref", "no reference within"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "#/oneOf/1", "may match branches 0 and 1"),
        ({"oneOf": [{"const": 1}, {"enum": [2, 1]}]}, "#/oneOf/1", "may match branches 0 and 1"),
        ({"enum": []}, "#/enum", "a list of"),
        ({"enum": ["a", 1], "type": "string"}, "#/enum", "the value 1 is not of the type string"),
        ({"const": None, "type": ["string", "integer"]}, "#/const", "the value None"),
        ({"minimum": 3}, "#/minimum", "needs the type integer or number"),
        ({"type": "string", "minimum": 3}, "#/minimum", "needs the type integer or number"),
        ({"type": "integer", "minimum": "3"}, "#/minimum", "expected a number"),
        ({"type": "integer", "minimum": 0.5}, "#/minimum", "a whole number"),
        ({"type": "number", "multipleOf": 0.1}, "#/multipleOf", "needs the type integer"),
        ({"type": "integer", "multipleOf": 3, "minimum": 2}, "#/multipleOf", "without limits"),
        ({"type": "string", "minLength": -1}, "#/minLength", "an integer from 0"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "#/maxLength", "nothing is allowed"),
        ({"type": "string", "maxLength": 10**6}, "#/maxLength", "to 10000"),
        ({"type": "string", "pattern": "a", "minLength": 3}, "#/pattern", "beside minLength"),
        ({"type": "string", "pattern": "a", "format": "date"}, "#/format", "beside 'pattern'"),
        ({"type": "string", "pattern": 3}, "#/pattern", "expected a text"),
        ({"type": "array", "items": [{}]}, "#/items", "expected an object"),
        ({"type": "array", "prefixItems": {}}, "#/prefixItems", "a list of schemas"),
        ({"type": "object", "required": ["a"]}, "#/required", "'a' is not among the properties"),
        ({"type": "object", "required": "a"}, "#/required", "a list of names"),
        ({"type": "object", "properties": {f"p{i}": {} for i in range(1001)}}, "#/properties", "at most 1000"),
    ],
)  # fmt: skip
def test_what_is_wrong_has_its_place(schema, place, message):
    with pytest.raises(sd.GrammarError) as caught:
        sd.SamplingParams(structured_outputs={"json": schema})
    assert caught.value.place == place
    assert message in str(caught.value)
    assert isinstance(caught.value, sd.InvalidParamsError)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({}, "given: nothing"),
        ({"json": {}, "regex": "a"}, "given: json, regex"),
        ({"jsno": {}}, "unknown field 'jsno'"),
        ("a", "it is a str"),
        ({"json": "{"}, "no JSON value"),
        ({"json": {"a": object()}}, "no JSON value"),
        ({"json": {"const": float("nan")}}, "no JSON value"),
        ({"regex": ""}, "not empty"),
        ({"regex": 3}, "expected a text"),
        ({"grammar": ""}, "not empty"),
        ({"choice": []}, "a list of texts"),
        ({"choice": "abc"}, "a list of texts"),
        ({"choice": ["a", ""]}, "a list of texts"),
        ({"structural_tag": "[]"}, "a JSON object"),
        ({"regex": "a", "disable_any_whitespace": 1}, "True or False"),
        ({"regex": "a" * (MOST_CHARACTERS + 1)}, f"at most {MOST_CHARACTERS}"),
        ({"json": " " * (MOST_CHARACTERS + 1)}, f"at most {MOST_CHARACTERS}"),
        ({"choice": ["ab"] * MOST_CHARACTERS}, f"at most {MOST_CHARACTERS}"),
        ({"json": '{"items":' * 65 + "{}" + "}" * 65}, "at most 64"),
        ({"json": "[" * 100_000}, "no JSON value"),
    ],
)
def test_what_is_wrong_is_named(value, message):
    with pytest.raises(sd.GrammarError, match="structured_outputs: ") as caught:
        sd.SamplingParams(structured_outputs=value)
    assert message in str(caught.value)
