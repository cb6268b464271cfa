"""What the model is told."""


def messages_for(note, question="Say in one short sentence what the note is about."):
    return [{"role": "system", "content": f"Here is a note:\n{note}"}, {"role": "user", "content": question}]
