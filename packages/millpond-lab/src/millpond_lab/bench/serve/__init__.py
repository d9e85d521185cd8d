"""Load generator for OpenAI-compatible servers.

`asks` says what a request is, `traces` and `synthetic` make lists of them, `client` sends one and notes its times,
`drive` says when each is sent, `figures` makes numbers of the times, `gauges` asks the server for its own, `run` puts
all together, `table` prints it. Nothing here knows Millpond's engine: peers run through the same client.
"""
