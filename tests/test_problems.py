"""Problems and verifier: tables, real file forms, and hostile text, which must neither hang nor run."""
import json
import random
import threading
import time
from fractions import Fraction

import pytest

import tandem
from tandem import Problem, UserError, encode_prompt, extract_boxed, final_answer, load_problems, verify


@pytest.mark.parametrize("text, want", [
    ("no box", None), (r"\boxed{7}", "7"), (r"\boxed{1} and \boxed{2}", "2"), (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
    (r"\boxed{1} then \boxed{2", "1"), (r"\boxed{", None), (r"\boxed{}", ""), (r"\boxed {5}", "5"), (r"\boxed 5", None), (r"\fbox{3}", None),
    (r"{ \boxed{5}", "5"), (r"} \boxed{5} }", "5"), (r"\boxed{\{1, 2\}}", r"\{1, 2\}"), (r"\boxed{a\\}", "a\\\\"), (r"\boxed{\boxed{3} + 1}", "3"),
    (r"\boxed{\text{a \} b}}", r"\text{a \} b}"), ("\\boxed{4\n}", "4\n"),
])
def test_the_last_balanced_box(text, want):
    assert extract_boxed(text) == want


@pytest.mark.parametrize("text", ["\\boxed{" * 200_000, "\\boxed" + " " * 10**6, "{" * 10**6, "}" * 10**6, "\\boxed{" * 100_000 + "}" * 100_000,
                                  "\\" * 10**6, "\\boxed{1}" * 100_000])
def test_boxes_are_found_in_linear_time(text):
    began = time.perf_counter()
    extract_boxed(text)
    assert time.perf_counter() - began < 5


RIGHT = [("7", "7"), ("7.0", "7"), ("7.00", "7"), ("1,234", "1234"), ("1234", "1,234"), ("$18", "18"), (r"\$18", "18"), ("-3", "-3"), ("+3", "3"), ("0.5", r"\frac{1}{2}"),
         (r"\frac{2}{4}", r"\frac12"), (r"\dfrac{1}{2}", "0.5"), ("1/2", "0.5"), (r"50\%", "50"), ("50%", "50"), (r"2\sqrt{3}", r"\sqrt{12}"),
         (r"x^2 + 2x + 1", r"(x+1)^2"), (r"\{1, 2\}", r"\{2, 1\}"), (r"(1, 2)", r"(1,2)"), (r"\text{Evelyn}", "Evelyn"), (r"\pi/2", r"\frac{\pi}{2}"),
         ("1000000", "10^6"), (r"1\,000", "1000"), ("007", "7"), (r"3^{2}", "9"), (" 12 ", "12"), (r"\left(3, \frac{\pi}{2}\right)", r"(3,\frac{\pi}{2})"),
         ("x = 7", "7"), ("x=5", "x=5"), ("12.", "12"), ("true", "True"), (r"\text{no}", "No"), ("new york", "New York")]
WRONG = [("8", "7"), ("-7", "7"), ("", "7"), ("seven", "7"), ("1.234", "1234"), ("7.01", "7"), (r"\frac{1}{3}", "0.33"), ("1/0", "7"), ("(2, 1)", "(1, 2)"),
         ("1e9", "7"), ("x", "y"), (r"\frac{1}{0}", "7"), (r"\unknown{", "7"), ("7 or 8", "7"), ("nan", "7"), (r"\infty", "7"), ("{", "7"),
         ("13=12", "12"), ("99=12", "12"), ("1=2=12", "12"), ("x=5=12", "12"), ("x=6=5", "x=5"), ("on", "no"), ("silent", "listen"), ("BA", "AB"), ("X", "x"), ("york new", "New York")]


@pytest.mark.parametrize("box, answer, want", [(b, a, 1.0) for b, a in RIGHT] + [(b, a, 0.0) for b, a in WRONG])
def test_verify(box, answer, want):
    assert verify(f"Some steps: 1 + 1 = 2.\n\nAnswer: \\boxed{{{box}}}", answer) == want


def test_only_the_last_box_counts():
    assert verify(r"\boxed{7} no, \boxed{8}", "7") == 0 and verify(r"\boxed{8} no, \boxed{7}", "7") == 1 and verify("the answer is 7", "7") == 0


HOSTILE = ["9^{9^{9^{9^9}}}", "(" * 400, "\\frac{" * 80 + "1" + "}{2}" * 80, "10^{10^{10}}", "1000000!", "\\sum_{i=1}^{10^{12}} i^{i}", "\x00\n\r7", "__import__('os').system('touch /tmp/tandem-was-here')",
           "'); import os; os.abort()", "\\input{/etc/passwd}", "9" * 499, "x" * 400, "\udcff", "$$$$", "\\int_0^1 \\int_0^1 e^{x^{y^{x^y}}} dx dy", "7\"], [\"7"]


@pytest.mark.parametrize("box", HOSTILE)
def test_hostile_answers_are_wrong_within_the_deadline(box, monkeypatch, tmp_path):
    grader = tandem.SymbolicGrader()
    monkeypatch.setattr(tandem, "grader", grader)
    monkeypatch.setattr(tandem.SymbolicGrader.equal.__wrapped__, "__defaults__", (2.0,))
    assert verify(r"\boxed{x+1}", "1+x") == 1  # the child is up
    began = time.perf_counter()
    assert verify(f"\\boxed{{{box}}}", "8") == 0
    assert time.perf_counter() - began < 4
    assert verify(r"\boxed{x + 2}", "2+x") == 1  # and the next answer is graded again
    from pathlib import Path
    assert not Path("/tmp/tandem-was-here").exists()
    grader.child.kill()


def test_the_deadline_holds_in_a_thread(monkeypatch):
    monkeypatch.setattr(tandem.SymbolicGrader.equal.__wrapped__, "__defaults__", (1.5,))
    results = []
    thread = threading.Thread(target=lambda: results.extend([verify(r"\boxed{9^{9^{9^{9^8}}}}", "7"), verify(r"\boxed{y+1}", "1+y")]))
    thread.start()
    thread.join(30)
    assert results == [0.0, 1.0]


def test_a_missing_math_verify_is_an_error_not_a_zero(monkeypatch):
    grader = tandem.SymbolicGrader()
    monkeypatch.setattr(grader, "CHILD", "import no_such_module")
    with pytest.raises(UserError, match="math-verify"):
        grader.equal("x", "y")


@pytest.mark.parametrize("box, numbers, target, want", [
    ("(7 - 3) * 6", (3, 6, 7), 24, 1), ("(7-3)*6 = 24", (3, 6, 7), 24, 1), (r"(7 - 3) \times 6", (3, 6, 7), 24, 1), (r"8 \div (3 - 8 \div 3)", (3, 8, 3, 8), 24, 1),
    (r"\left(1 + 2\right) \cdot 3", (1, 2, 3), 9, 1), ("3 + 4", (3, 4, 5), 7, 1),  # a number may be left out
    ("-3 + 10", (3, 10), 7, 1), ("1/3 + 2/3", (1, 3, 2, 3), 1, 1),
    (r"8 \div (3 - \frac{8}{3})", (3, 8, 3, 8), 24, 1), (r"\frac {8} {4}", (8, 4), 2, 1),
    (r"\frac84", (84,), 2, 0), (r"\frac82", (82, 1), 4, 0), (r"\frac 84", (84,), 2, 0), (r"\frac{8}4", (8, 4), 2, 0), (r"\frac8{4}", (8, 4), 2, 0),  # (TeX takes a digit each)
    ("2 + 1/99/99/99/99/99", (2, 1, 99, 99, 99, 99, 99), 2, 0), ("64/4/2", (64, 4, 2), 8, 1), ("9 - 4 - 3", (9, 4, 3), 2, 1),  # exact
    ("3 + 3", (3, 4), 6, 0), ("6", (3, 4), 6, 0), ("2 ** 3", (2, 3), 8, 0), ("2^3", (2, 3), 8, 0), ("7 // 2", (7, 2), 3, 0), ("1/0", (1, 0), 0, 0), ("10 / (5 - 5)", (10, 5, 5), 0, 0),
    ("3 +", (3, 4), 3, 0), ("", (3,), 3, 0), ("12", (1, 2), 12, 0), ("3.0 + 4", (3, 4), 7, 0), ("3,4", (3, 4), 7, 0), ("(3)(4)", (3, 4), 12, 0), *((box, numbers, target, 0) for box, numbers, value in (  # what stands side by side is neither a sum nor a product
        ("3(4)", (3, 4), 7), ("20(3)", (20, 3), 23), ("(20)(3)", (20, 3), 23), (r"5\left(2\right)", (5, 2), 7), ("2*3(4)", (2, 3, 4), 14), (r"3\frac{4}{2}", (3, 4, 2), 5),
        (r"(4)\frac{6}{2}", (4, 6, 2), 7), ("(3)4", (3, 4), 7), (r"\frac{6}{2}4", (6, 2, 4), 7), (r"\frac{6}{2}(4)", (6, 2, 4), 7)) for target in (value, 12, 60, 10, 24, 6)),
     ("3 4", (3, 4), 12, 0), ("3 4", (3, 4), 34, 0), ("3 + 4 + 5", (3, 4), 12, 0),
    ("__import__('os')", (3,), 3, 0), ("(" * 150 + "3" + ")" * 150, (3,), 3, 0), ("1" * 5000, (1,), 1, 0), ("[3][0]", (3, 0), 3, 0), ("３ + 4", (3, 4), 7, 0), ("03 + 4", (3, 4), 7, 0), ("True", (1,), 1, 0),
])
def test_countdown(box, numbers, target, want):
    assert verify(f"\\boxed{{{box}}}", str(target), numbers) == want


def test_countdown_is_graded_as_exact_fractions_are():
    """Against a plain evaluator of random expressions, some of them a little off."""
    draw = random.Random(3)
    for i in range(120):
        numbers = [draw.randint(1, 99) for _ in range(draw.choice((2, 3, 4)))]
        terms = [(Fraction(n), str(n)) for n in numbers]
        while len(terms) > 1:
            (a, left), (b, right) = (terms.pop(draw.randrange(len(terms))) for _ in "ab")
            sign = draw.choice("+-*/" if b else "+-*")
            value = {"+": a.__add__, "-": a.__sub__, "*": a.__mul__, "/": a.__truediv__ if b else a.__mul__}[sign](b)
            terms.append((value, f"({left} {sign} {right})"))
        value = terms[0][0] + (Fraction(draw.choice((-1, 1)), 97**4) if i % 3 == 0 else 0)
        assert verify(f"\\boxed{{{terms[0][1]}}}", str(value), tuple(numbers)) == float(i % 3 != 0)


def test_generated_countdown_problems_are_solvable_by_their_solution_and_disjoint():
    test, skipped = load_problems("countdown-test")
    train, _ = load_problems("countdown")
    assert len(test) == 1000 and len(train) == 10000 and skipped == 0
    for p in test[:200] + train[:200]:
        assert verify(p.solution, p.answer, p.numbers) == 1 and verify(f"\\boxed{{{p.answer}}}", p.answer, p.numbers) == 0
        assert all(str(n) in p.question for n in p.numbers) and "at most" in p.question
    keys = [(tuple(sorted(p.numbers)), p.answer) for p in test + train]
    assert len(set(keys)) == 11000


# --- files ----------------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("row, want", [
    ({"question": "Q?", "answer": "48/2 = 24\nso 1\n#### 1,024"}, Problem("Q?", "1,024", "48/2 = 24\nso 1\n#### 1,024")),  # GSM8K
    ({"problem": "Q?", "solution": r"thus \boxed{\frac{1}{2}} cm"}, Problem("Q?", r"\frac{1}{2}", r"thus \boxed{\frac{1}{2}} cm")),  # MATH, Minerva
    ({"id": 1, "problem": "Q?", "solution": "long\nwork", "answer": "204"}, Problem("Q?", "204", "long\nwork")),  # AIME
    ({"problem": "P?", "answer": 27.0, "question": "Q?"}, Problem("Q?", "27", "27.0")),  # AMC
    ({"Question": "how many?", "Body": "Two apples.", "Answer": 2.5}, Problem("Two apples. how many?", "2.5", "2.5")),  # SVAMP
    ({"input": "Q ?", "target": 8}, Problem("Q ?", "8", "8")),  # MAWPS
    ({"prompt": "Q?", "answer": "x"}, Problem("Q?", "x", "x")),
])
@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet"])
def test_file_forms_and_column_names(tmp_path, row, want, kind):
    import datasets
    path = str(tmp_path / f"data.{kind}")
    if kind == "parquet":
        datasets.Dataset.from_list([row, row]).to_parquet(path)
    elif kind == "json":
        (tmp_path / "data.json").write_text(json.dumps([row, row]))
    else:
        (tmp_path / "data.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(row) + "\n")
    assert load_problems(path) == ([want, want], 0)


def test_a_file_of_ones_own_countdown_problems(tmp_path):
    row = {"question": "Make 24.", "answer": 24, "countdown_numbers": [3, 6, 7]}
    (tmp_path / "c.jsonl").write_text(json.dumps(row) + "\n" + json.dumps({**row, "countdown_numbers": None}) + "\n")
    (problem, plain), _ = load_problems(str(tmp_path / "c.jsonl"))
    assert problem.numbers == (3, 6, 7) and verify(r"\boxed{(7 - 3) * 6}", problem.answer, problem.numbers) == 1 and plain.numbers == ()


def test_the_built_in_countdown_problems_are_those_that_make_toy_makes():
    import make_toy
    rows = make_toy.countdown_rows(1100)
    for problems, some in ((load_problems("countdown-test")[0], rows[:1000]), (load_problems("countdown")[0], rows[1000:])):
        assert [(p.question, p.answer, p.solution, list(p.numbers)) for p in problems[:len(some)]] == [tuple(row.values()) for row in some]


@pytest.mark.parametrize("numbers", [True, "13,6,7", [3.5, 6, 7], [3, None], {"a": 1}, [-3, 6, 7], [[3]], 5])
def test_countdown_numbers_that_are_none_are_skipped_and_counted(tmp_path, numbers):
    row = {"question": "Make 24.", "answer": "24"}
    (tmp_path / "c.jsonl").write_text(json.dumps({**row, "countdown_numbers": numbers}) + "\n")
    with pytest.raises(UserError, match="none of its 1 rows|could not be read"):
        load_problems(str(tmp_path / "c.jsonl"))


def test_file_names_are_names_not_patterns(tmp_path):
    (tmp_path / "d[0].jsonl").write_text(json.dumps({"question": "Q?", "answer": "1"}) + "\n")
    assert load_problems(str(tmp_path / "d[0].jsonl"))[0][0].question == "Q?"


def test_rows_without_question_or_answer_are_skipped_and_counted(tmp_path):
    rows = [{"question": "Q?", "answer": "1"}, {"question": "", "answer": "1"}, {"question": "Q?", "answer": None}, {"question": None, "answer": "1"},
            {"question": "Q?", "answer": "  "}, {"question": "Q?", "answer": "a long\nproof without a box"}, {"question": "Q2?", "answer": "2"}]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    problems, skipped = load_problems(str(tmp_path / "d.jsonl"))
    assert [p.question for p in problems] == ["Q?", "Q2?"] and skipped == 5


@pytest.mark.parametrize("content, message", [
    (None, "no data"), ("", "no data"), ("{not json", "could not be read"), ('{"text": "a"}\n', "it has text"), ('{"question": "a"}\n', "answer column"),
    ('{"question": "a", "answer": ""}\n', "none of its 1 rows"), ("\x00\x01\x02", "could not be read"), ("[]", "could not be read|no rows"), ('"text"\n', "could not be read|it has"), ('{"question": "\xe9", "answer": "1"}\n', "could not be read"),
])
def test_files_that_will_not_do(tmp_path, content, message):
    path = tmp_path / "d.jsonl"
    if content is not None:
        path.write_bytes(content.encode("latin-1"))
    with pytest.raises(UserError, match=message):
        load_problems(str(path))


@pytest.mark.parametrize("name", ["gsm9k", "data.csv", "no/such/file.jsonl", "."])
def test_names_that_are_no_data(name):
    with pytest.raises(UserError, match="countdown"):
        load_problems(name)


def test_final_answers():
    assert [final_answer(v) for v in (r"x #### \boxed{5}", "48/2 = 24\n#### 1,024", r"so \boxed{\frac12}.", 27.0, 2.5, 3, "x", None, float("nan"), ["x", "y"], ["z"], "", "a\nb", "y" * 300)] == [
        "5", "1,024", r"\frac12", "27", "2.5", "3", "x", None, None, None, "z", None, None, None]


# --- prompts --------------------------------------------------------------------------------------------------------------------------

def test_the_chat_template_is_applied_once_with_the_turn_open(toy):
    ids = encode_prompt(toy.tokenizer, "Add 1 2")
    assert toy.tokenizer.decode(ids) == "<|im_start|>user\nAdd 1 2<|im_end|>\n<|im_start|>assistant\n"


class WithBos:
    """A tokenizer that begins every text with id 1, and whose template writes <s> (id 1) itself."""
    chat_template = "yes"

    def apply_chat_template(self, messages, tokenize, add_generation_prompt, **settings):
        assert settings == {"enable_thinking": False} and add_generation_prompt and not tokenize
        return "<s>" + messages[0]["content"] + ">"

    def __call__(self, text, add_special_tokens=True):
        from types import SimpleNamespace
        ids = ([1] if add_special_tokens else []) + ([1] if text.startswith("<s>") else []) + [ord(c) for c in text.removeprefix("<s>")]
        return SimpleNamespace(input_ids=ids)


def test_special_tokens_are_not_added_twice_and_thinking_is_off():
    assert encode_prompt(WithBos(), "q") == [1, ord("q"), ord(">")]
    plain = WithBos()
    plain.chat_template = None
    assert encode_prompt(plain, "q") == [1] + [ord(c) for c in "Question: q\nAnswer:"]


def test_text_behind_the_first_stop_id_does_not_exist(toy):
    import torch
    ids = toy.tokenizer.encode("a\\boxed{1}") + [toy.tokenizer.eos_token_id] + toy.tokenizer.encode(" \\boxed{2}")
    n = len(toy.tokenizer.encode("a\\boxed{1}")) + 1
    rolled = tandem.Rollout(torch.tensor([ids, ids]), torch.tensor([n, n - 1]), None, torch.tensor([True, False]), None)
    assert tandem.completion_texts(toy.tokenizer, rolled) == ["a\\boxed{1}"] * 2
