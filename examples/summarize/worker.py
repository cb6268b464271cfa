"""A worker that summarizes the text that is posted to it, and says what that took."""

from workers import Response, WorkerEntrypoint

PROMPT = "Summarize the text of the user in one short sentence. Answer with that sentence only."


class Default(WorkerEntrypoint):
    async def fetch(self, request):
        if request.method != "POST":
            return Response("POST a text to me\n", status=405, headers={"allow": "POST"})
        text = (await request.text()).strip()
        num_words = len(text.split())
        if not 0 < num_words <= self.env.MAX_WORDS:
            error = f"expected 1 to {self.env.MAX_WORDS} words, found {num_words}"
            return Response.json({"error": error}, status=400)
        result = await self.env.AI.run(
            self.env.MODEL,
            {
                "messages": [{"role": "system", "content": PROMPT}, {"role": "user", "content": text}],
                "max_tokens": 80,
                "temperature": 0,
            },
        )
        return Response.json(
            {
                "summary": result.response.strip(),
                "num_words": num_words,
                "num_tokens": result.usage.total_tokens,
            }
        )
