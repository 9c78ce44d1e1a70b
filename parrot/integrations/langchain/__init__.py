"""LangChain on Parrot: all calls of a chain form one graph in ServeCore. See docs/clients.md."""

from parrot.integrations.langchain.chat_model import ChatParrot
from parrot.integrations.langchain.messages import LazyAIMessage, LazyHumanMessage, fetch
from parrot.integrations.langchain.prompt import LazyPrompt

__all__ = ["ChatParrot", "LazyAIMessage", "LazyHumanMessage", "LazyPrompt", "fetch"]
