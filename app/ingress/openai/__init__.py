"""The OpenAI API: from request bodies to token ids and sampling parameters, and from tokens to answers.

`app.ingress.http` imports it; it imports the ingress's errors and the tokens of a conversation, never a replica.
Bodies come in through `requests`, tokens become answers through `answers`, and `description` documents both.
"""
