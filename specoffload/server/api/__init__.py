"""The HTTP API: routes, the JSON of requests and answers, and the responses that follow a job."""
