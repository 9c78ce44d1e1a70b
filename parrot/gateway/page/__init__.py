"""The page that shows a running ServeCore in a browser: who may look, what they see, and the feed
that keeps it up to date. It reads the rooms below and changes nothing in them, except that a
visitor may cancel what is theirs, that a call which is looked at tells its text as it comes, and
that the operator may drain engines. Nothing is done here while nobody looks."""
