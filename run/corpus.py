"""The text that the bundled tokenizer is trained on: common words, prose, code, JSON and a little of many languages."""

from __future__ import annotations

from collections.abc import Iterator

# Frequent English words, the most frequent first; each is repeated as often as its rank deserves.
_WORDS = """
the of and to in a is that for it as was with be by on not he his but at are this have from or had an they which one
you were all her she there would their we him been has when who will no more if out so up said what its about than
into them can only other time new some could these two may first then do any like my now over such our man me even
most made after also did many before must through years where much your way well down should because each just those
people how too little state good very make world still see own work long both between get know here day same think
another while last might us great old year off come since against go came right used take three use place small
found going never made most question answer token model request system memory server message key value block window
state layer data number list line word name type text file code test path error result return input output value
array string index index order start end next step second minute hour night morning house water light hand head eye
side country school part case point group problem fact week company change help idea move play turn call show need
feel become leave put mean keep let begin seem talk tell ask learn read write run walk stand lose pay meet include
continue set follow stop create speak allow add spend grow open win offer remember love consider appear buy wait
serve die send expect build stay fall cut reach kill remain suggest raise pass sell require report decide pull
explain hope develop carry break thank receive agree support hit produce eat cover catch draw choose cause different
important large big high low young early public able late hard real best better sure free clear full special easy
strong possible whole certain true local short single common simple similar
"""

_PROSE = """
A request arrives as a list of messages. It is turned into tokens, hashed into blocks, and sent to a worker that is
free.
Hello! How can I help you today? I am a small model with random weights, so please do not expect a sensible answer.
The quick brown fox jumps over the lazy dog, and the dog, being lazy, does nothing at all about it.
What is the capital of France? The capital of France is Paris. And of Germany? Berlin, since nineteen ninety.
If you want to know why the sky is blue, think about how light is scattered: short waves more than long ones.
She said that she would come on Monday, but it was Thursday before anyone had heard from her again.
Water boils at 100 degrees at sea level; on a mountain of 3,000 metres it boils at about 90.
First, read the question twice. Second, write down what you know. Third, check the answer against the question.
The ship had been at sea for forty days when the watch saw land, low and grey, under the morning cloud.
You're right, I'm sorry; that isn't what I meant. Let's try again, and don't worry: we'll get there, won't we?
Memory is cheap, time is not: a cache keeps what was computed once so that nobody has to compute it twice.
There are three kinds of people in the world: those who can count, and those who cannot.
Explain step by step how to make bread: mix flour, water, salt and yeast; wait; fold; wait again; bake until brown.
Yes. No. Maybe! Perhaps? "Of course," he answered, (without looking up) 'of course it does.'
Summarize the following text in one sentence, then translate it into Spanish, French and Chinese.
The function returns the number of tokens, or raises an error when the key is unknown or the value is missing.
You are a helpful assistant. Use the tools when you need them, and answer in the language of the user.
Shoal serves language models as a shoal of small supervised actors: gateway, recipe, entrypoint, prefill, decode.
"""

_TONGUES = """
你好，世界！今天天气怎么样？我是一个小模型，请不要期待有意义的回答。谢谢你的帮助。
人工智能正在改变我们的生活。北京是中国的首都，上海是最大的城市之一。
こんにちは、世界。今日はいい天気ですね。これは小さなモデルです。ありがとうございます。
안녕하세요, 세계. 오늘 날씨가 어떻습니까? 감사합니다.
Guten Tag! Wie geht es Ihnen? Das ist ein kleines Modell, und die Antwort ist nicht immer richtig.
Schöne Grüße.
Bonjour le monde ! Comment allez-vous ? Ceci est un petit modèle, où la réponse n'est pas toujours
juste. À bientôt.
¡Hola, mundo! ¿Cómo estás hoy? Este es un modelo pequeño y la respuesta no siempre es correcta.
Mañana será otro día.
Olá, mundo! Como você está? Este é um modelo pequeno e a resposta não é sempre correta. Obrigado,
até amanhã.
Ciao, mondo! Come stai? Questo è un piccolo modello; la risposta non è sempre giusta. Perché no?
Привет, мир! Как дела? Это маленькая модель, и ответ не всегда верный. Спасибо за помощь.
Γειά σου, κόσμε! Merhaba dünya! नमस्ते दुनिया! مرحبا بالعالم! שלום עולם! สวัสดีชาวโลก Xin chào thế
giới! Cześć, świecie!
🙂 🚀 🐟 ✅ ❌ → ← ≤ ≥ ≠ × ÷ ± ° € £ ¥ © … — – “quoted” ‘single’ «guillemets»
"""

_CODE = r'''
def add(a: int, b: int) -> int:
    """The sum of a and b."""
    return a + b


import asyncio
import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Point:
    x: float = 0.0
    y: float = 0.0

    @property
    def norm(self) -> float:
        return (self.x**2 + self.y**2) ** 0.5


async def main() -> None:
    for i in range(10):
        if i % 2 == 0 and i not in seen:
            await asyncio.sleep(0.1)
            print(f"{i}: {names[i]!r}")
        else:
            continue


if __name__ == "__main__":
    asyncio.run(main())
try:
    with open(path, "rb") as file:
        data = json.load(file)
except (OSError, ValueError) as error:
    raise RuntimeError(f"{path}: {error}") from None
finally:
    lock.release()
function greet(name) {
  const text = `Hello, ${name}!`;
  console.log(text);
  return text.length > 0 ? text : null;
}
#include <stdio.h>

int main(int argc, char **argv) {
    for (int i = 0; i < argc; ++i) {
        printf("%s\n", argv[i]);
    }
    return 0;
}
fn main() {
    let mut total: u64 = 0;
    for value in values.iter() {
        total += value;
    }
    println!("{}", total);
}
SELECT name, COUNT(*) AS total FROM users WHERE age >= 18 GROUP BY name ORDER BY total DESC LIMIT 10;
<!DOCTYPE html>
<html>
  <head><title>Page</title></head>
  <body><p class="note">Text</p></body>
</html>
$ git commit -m "fix: the first bug" && git push origin main
$ curl -s http://localhost:8000/v1/models | python -m json.tool
{"role": "user", "content": "Hello"}, {"role": "assistant", "content": null, "tool_calls": []}
{"name": "get_weather", "description": "The weather of a city", "parameters": {"type": "object",
 "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
 "required": ["city"], "additionalProperties": false}}
[{"id": 1, "ok": true, "items": [1, 2, 3]}, {"id": 2, "ok": false, "items": [], "error": "not found"}]
# Title

## Section

- first item
- second item

1. one
2. two

**bold**, *italic*, `code`, [link](https://example.com)
| name | value |
|---|---|
| alpha | 1.5 |
| beta | 2.25 |

> A quotation, and then --- a line.

'''


def texts() -> Iterator[str]:
    """The training text, always the same, piece by piece."""
    for rank, word in enumerate(_WORDS.split()):
        num_times = max(4, 60 // (1 + rank // 8))
        yield f" {word}" * num_times
        yield f"{word.capitalize()} " * (num_times // 4)
    yield from (_PROSE.replace("\n", " "), _CODE) * 3
    yield _TONGUES
    yield from (str(number) for number in range(100))
