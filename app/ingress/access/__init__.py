"""Who may use the ingress: API keys at rest, the limits of each key, and bounded admission of requests.

The routes import this room; it imports the ingress's errors and counters. A request's headers and body size come in,
a permit to run or a refusal in OpenAI's shape goes out.
"""
