"""The web page that shows a running ServeCore: sign-in, the rows that it shows, and the feed that
updates them. The page reads ServeCore's state. It changes state only on request: a visitor may
cancel their own calls, end their own sessions and delete their finished runs, and the operator may
drain engines. Without an open page this package only keeps the last finished runs."""
