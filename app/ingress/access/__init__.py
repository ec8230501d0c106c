"""Access to the ingress: API keys at rest, the admin key, rate limits per key, service classes, bounded admission.

The routes, the settings and `app.keys` import this room; it imports the ingress's errors, telemetry and ASGI
plumbing. A request's Authorization header and token count come in, an admission or a refusal in OpenAI's shape goes
out.
"""
