"""A worker without a model: it greets, and shows what a request and a response can do."""

from urllib.parse import parse_qs, urlsplit

from workers import Response, WorkerEntrypoint


class Default(WorkerEntrypoint):
    async def fetch(self, request):
        url = urlsplit(request.url)
        if url.path == "/":
            name = parse_qs(url.query).get("name", ["world"])[0]
            return Response(f"{self.env.GREETING}, {name}!\n")
        if url.path == "/echo" and request.method == "POST":
            return Response.json({"you_sent": await request.json()})
        if url.path == "/home":
            return Response.redirect(f"{url.scheme}://{url.netloc}/")
        return Response(f"There is nothing at {url.path}\n", status=404)
