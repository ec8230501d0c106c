"""The OpenAPI document of all routes: operations, response bodies as models, and the document made of them.

The routes and the API reference import this room; it imports the request schemas. Nothing comes in at run time, and the
document goes out as `/openapi.json`.
"""
