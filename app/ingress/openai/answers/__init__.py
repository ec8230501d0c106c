"""From the tokens of one conversation to one choice of an answer: text, logprobs, tool calls, and the finish reason.

Only `app.ingress.openai` imports this room; it imports request schemas and a conversation's ending. Tokens come from
the conversation's reader, choices go to the shapes of completions and chats.
"""
