"""No server: the `LLM` class in one process.

python examples/offline.py
"""

from minisgl import LLM, SamplingParams


def main() -> None:
    with LLM() as llm:
        prompts = ["The capital of France is", "Water boils at", "One, two, three,"]
        for prompt, result in zip(
            prompts, llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12)), strict=True
        ):
            print(f"{prompt!r} -> {result.text!r} ({result.finish_reason}, {result.completion_tokens} tokens)")

        answer = llm.chat([{"role": "user", "content": "Who are you?"}], SamplingParams(temperature=0, max_tokens=32))
        print("chat:", answer.text)


if __name__ == "__main__":
    main()
