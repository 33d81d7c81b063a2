"""The description of the API for its readers: /openapi.json, and /docs, a page that shows it.

    routes + bodies.py -> describe -> OpenAPI 3.1
The page takes its script and style from a public server (cdn.jsdelivr.net), as FastAPI makes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from outrider.actors.http.bodies import Body

PATHS = ("/openapi.json", "/docs")


def describe(routes: FastAPI, bodies: Mapping[str, type[Body]]) -> dict[str, Any]:
    """The OpenAPI document of the routes. bodies: by path, what a POST to it may say."""
    document = get_openapi(title=routes.title, version=routes.version, routes=routes.routes)
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    for path, kind in bodies.items():
        schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas |= schema.pop("$defs", {}) | {kind.__name__: schema}
        reference = {"$ref": f"#/components/schemas/{kind.__name__}"}
        document["paths"][path]["post"]["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": reference}},
        }
    return document
