"""Request bodies as OpenAI and vLLM define them: schemas, messages, tools, formats, chat templates.

Only `app.ingress.openai` imports this room; it imports nothing but the ingress's errors. Clients' JSON comes in,
validated values go out; a body with a mistake ends here, with the parameter that holds it.
"""
