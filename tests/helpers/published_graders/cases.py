"""Responses and labels that graders may disagree about, and what ours says of each.

`CASES` has one list of rows (response, label, our score) for each scorer; a fourth entry is the
prompt's metadata. The scores are held by tests/unit/test_published_graders.py, which also runs the
published graders over them.
"""

from typing import Any, NamedTuple


class Case(NamedTuple):
    "One graded response"

    scorer: str  # name of ours
    text: str  # the response
    label: Any  # of the prompt
    ours: float  # our score
    metadata: dict[str, Any]  # of the prompt


def _box(*rows: tuple[str, str, float]) -> list[tuple[str, str, float]]:
    "Answers in a box"
    return [(rf"\boxed{{{answer}}}", label, score) for answer, label, score in rows]


def _line(*rows: tuple[str, Any, float]) -> list[tuple[str, Any, float]]:
    "Answers on a line of their own, as DAPO's prompt asks"
    return [(f"Answer: {answer}", label, score) for answer, label, score in rows]


# fmt: off
NUMBERS = _box(
    ("4", "4", 1), ("5", "4", 0), ("42.0", "42", 1), ("042", "42", 1), ("42", "42.0", 1), ("42", "042", 1),
    ("-7", "7", 0), ("-07", "-7", 1), ("\u22127", "-7", 1), ("+7", "7", 1), ("5.50", "5.5", 1),
    (r"\$5.50", "5.5", 1), ("0.5", "1/2", 1), (r"\frac{1}{2}", "0.5", 1),
    (r"\frac{2}{4}", r"\frac{1}{2}", 1), (r"\dfrac{1}{2}", r"\frac{1}{2}", 1),
    (r"\frac12", r"\frac{1}{2}", 1), (r"1\frac{1}{2}", "1.5", 1), (r"3\frac12", "7/2", 1),
    ("0.333", "1/3", 0), ("0.333333", "1/3", 1), (r"0.\overline{3}", "0.3", 0),
    (r"0.\overline{3}", "1/3", 1), (r"\overline{34}", "34", 0), ("1,234", "1234", 1),
    ("1{,}234", "1234", 1), (r"1\,234", "1234", 1), ("1 234", "1234", 1), (r"1,\!234", "1234", 1),
    ("1 2", "12", 0), ("1,2", "12", 0), ("10^6", "1000000", 1), ("1e6", "1000000", 1),
    (r"1.5 \times 10^3", "1500", 1), ("2^{10}", "1024", 0), ("5!", "120", 0), (r"\binom{5}{2}", "10", 0),
    (r"4\%", "0.04", 1), (r"4\%", "4", 1), (r"50\%", "0.5", 1), (r"\infty", r"\infty", 1),
    (r"-\infty", r"\infty", 0), ("{4}", "4", 1), ("((4))", "4", 1), (r"\boxed{4}", "4", 1),
    (r"\text{4}", "4", 1), (r"\textbf{4}", "4", 1), (r"4\ldots", "4", 0), (r"\pm 4", "4", 0),
    ("4.", "4", 1), ("", "4", 0), ("\uff14", "4", 1), (r"\pi", "3.14", 0),
    (r"3.2 \times 10^{-19}", r"1.6 \times 10^{-19}", 0), (r"-\frac{1}{20!}", r"\frac{1}{20!}", 0),
    ("1.0000001", "1.0000004", 0), ("0.00000045", "0.00000041", 0), ("2.6667", r"\frac{8}{3}", 1),
    ("2,74", "2.74", 1), (r"4\text{ million}", "4", 0), ("\u20135", "-5", 1), ("5\u3002", "5", 1),
    (r"\varnothing", r"\emptyset", 1), (r"\text{no solution}", r"\emptyset", 1), ("45\u00b0", "45", 1),
    ("\u221a2", r"\sqrt{2}", 1), (r"\textbf{(C)}\ 12", "C", 1), ("12 meters", "12 m", 1),
    ("3.14159265", r"\pi", 1),
)
EQUATIONS = _box(
    ("x=4", "4", 1), (r"x = 4", "4", 1), (r"\theta_1 = 4", "4", 1), ("f(x)=x^2", "x^2", 1),
    ("AB=5", "5", 1), (r"\angle A = 60^\circ", "60", 1), (r"\text{Area}=24", "24", 1), ("|AB|=5", "5", 1),
    (r"P(A)=\frac{1}{2}", "0.5", 1), ("3=4", "4", 0), ("5+5=4", "4", 0), (r"a\ne b=4", "4", 0),
    ("5+5=10", "10", 1), ("x=2+2=4", "4", 1), ("x=3=4", "4", 0), ("4=5=4", "4", 0), ("4,4,4", "4", 0),
    ("x=4,x=3", "3", 0), ("x=4,x=3", "4", 0), (r"\{3=4\}", "4", 0), ("(3=4)", "4", 0),
    (r"\left[3=4\right]", "4", 0), (r"3 \equiv 4", "4", 0), (r"3 \approx 4", "4", 0), ("4=x", "4", 0),
    ("x>=4", "4", 0), (r"x \ge 4", "4", 0), (r"x \ne 4", "4", 0), ("4", "x=4", 1), ("x=4", "x=4", 1),
    ("y=4", "x=4", 0), ("3=4", "x=4", 0), ("y=2x+3", "2x+3", 1), ("2x+3", "y=2x+3", 1),
    ("z=2x+3", "y=2x+3", 0), (r"x=3 \text{ or } x=4", r"\{3,4\}", 1),
    (r"5=3 \text{ or } x=4", r"\{3,4\}", 0),
)
COMPLEX = _box(
    ("4i^2", "-4", 0), ("i^2", "-1", 0), ("(1+i)^2", "2i", 1), (r"\frac{1}{i}", "-i", 1),
    (r"e^{i\pi}", "-1", 0), (r"\sqrt{-4}", "2i", 1), ("|3+4i|", "5", 0), ("1+2i", "2i+1", 1),
    ("1-2i", "1+2i", 0), ("3j", "3i", 0), (r"\sum_{i=1}^{3} i", "6", 0),
)
EXPRESSIONS = _box(
    (r"\sqrt{8}", r"2\sqrt{2}", 1), ("2sqrt2", r"2\sqrt2", 0),
    (r"\frac{\sqrt3}{3}", r"\frac{1}{\sqrt{3}}", 1), ("(x-1)(x+1)", "x^2-1", 1), ("x^2+1", "x^2-1", 0),
    ("x+y", "a+b", 0), (r"\log 100", "2", 0), (r"\ln e", "1", 0), (r"\sin^2 x + \cos^2 x", "1", 0),
    ("(1,2)", "(1, 2)", 1), ("(2,1)", "(1,2)", 0), ("(1,234)", "(1,234)", 1), ("(1,2)", "[1,2]", 0),
    ("[0,1)", "[0,1)", 1), (r"\{2,1\}", r"\{1,2\}", 1), ("1,2,3", "1,2,3", 1), ("3,2,1", "1,2,3", 1),
    (r"x \in [1,2]", "[1,2]", 1), (r"1 \le x \le 2", "[1,2]", 1), ("[1,2]", r"1 \le x \le 2", 1),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}", 1),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", "(1,2)", 0), ("5:3", "5:3", 1), ("5/3", "5:3", 1),
    ("12:30", "12:30", 1), (r"\text{yes}", "yes", 1), ("Yes", "yes", 1), ("A", "A", 1),
    (r"4 \text{ or } 5", "4", 0), ("4,5", "4", 0),
)
UNITS = _box(
    ("72 km", "72", 1), (r"72\text{ clips}", "72", 1), ("72 clips", "72", 1),
    (r"12~\text{apples}", "12", 1), (r"72\text{ cm}^2", "72", 1), (r"72\text{ cm}", r"72\text{ m}", 0),
    ("72", r"72\text{ m}", 1), (r"60^\circ", "60", 1), (r"\frac{\pi}{2}", r"90^\circ", 0), ("72x", "72", 0),
    (r"\$72", "72", 1),
)
PLACES = [
    (r"\boxed{72", "72", 0), (r"so \boxed{4} or \boxed{72", "4", 0), (r"\boxed{4} and \boxed{5}", "5", 0),
    (r"\boxed{4} and \boxed{5}", "4,5", 1), (r"\boxed{4} and \boxed{5}", "4", 0), (r"\fbox{72}", "72", 1),
    (r"\boxed 72", "72", 1), ("The answer is 72.", "72", 1), ("The answer is $x=72$.", "72", 1),
    ("The answer is 72 clips.", "72", 1), ("The answer is 4 million.", "4", 0),
    ("The final answer is $72$. I hope it is correct.", "72", 1),
    ("The answer is 72 because 70+2=72.", "72", 1),
    ("My first answer is 7. The correct answer is 72.", "72", 1),
    ("\u7b54\u6848\u662f \\frac{1}{2}\u3002", r"\frac{1}{2}", 1),
    (r"<answer>\frac{1}{2}</answer>", r"\frac{1}{2}", 1), (r"<answer>\frac{1}{2}</answer>", "2", 0),
    (r"so x equals \sqrt{3}", "3", 0), ("it is x^2", "2", 0), ("#### 1,072", "1072", 1),
    ("It is $72$ clips", "72", 1), ("9 12 72", "72", 1), ("I get 72, I think", "72", 1), ("4 or 5", "4", 0),
    ("no number", "72", 0), ("", "72", 0), (r"The answer is 5, no: \boxed{72}", "72", 1),
    (r"\boxed{72} so the answer is 5", "72", 1),
]
DEEPSCALER = [
    (rf"<think>hm</think>{text}", label, score)
    for text, label, score in _box(
        ("4", "4", 1), ("42.0", "42", 1), (r"\frac{2}{4}", r"\frac{1}{2}", 1), ("0.5", r"\frac{1}{2}", 1),
        ("3=4", "4", 0), ("x=4", "4", 1), ("1,234", "1234", 1), (r"4\text{ cm}", "4", 1),
        (r"0.\overline{3}", "0.3", 0), (r"\sqrt{8}", r"2\sqrt{2}", 1), ("(1,2)", "(1, 2)", 1),
        ("4", r"\boxed{4}", 1), ("4i^2", "-4", 0),
    )
] + [
    (r"<think>\boxed{4}</think> done", "4", 0), (r"<think>\boxed{4}", "4", 0), (r"\boxed{4}", "4", 1),
    ("<think>hm</think>4", "4", 0), (r"<think>hm</think>\boxed{4", "4", 0),
    (r"a</think>\boxed{5}</think>\boxed{4}", "4", 1),
]
DAPO = _line(
    ("34", "34", 1), ("35", "34", -1), ("$34$", "34", 1), ("$34$.", "34", 1), (r"\boxed{34}", "34", 1),
    (r"\boxed{34", "34", -1), ("**34**", "34", 1), ("034", "34", 1), ("034", "034", 1), ("34", "034", 1),
    ("34.0", "34", 1), ("34", "34.0", 1), ("34", 34.0, 1), ("34.5", "34", -1), ("1,234", "1234", 1),
    ("1{,}234", "1234", 1), (r"1\,234", "1234", 1), ("1 234", "1234", 1), ("3 4", "34", -1),
    ("34 km", "34", 1), ("34 units", "34", 1), ("34 square units", "34", 1), (r"34\text{ cm}^2", "34", 1),
    ("34 degrees", "34", 1), (r"34^\circ", "34", 1), ("34 dollars", "34", 1), (r"\$34", "34", 1),
    ("34 ways", "34", 1), ("34 apples", "34", 1), ("34 million", "34", -1), ("34 miles", "34", 1),
    ("points34", "34", -1), ("34x", "34", -1), ("x = 34", "34", 1), (r"$\theta = 34$", "34", 1),
    ("3=34", "34", -1), ("5+5=34", "34", -1), ("x=3=34", "34", -1), (r"a \ne b = 34", "34", -1),
    ("x = 33, y = 34", "34", -1), ("30+4", "34", -1), (r"\frac{68}{2}", "34", -1), (r"\text{34}", "34", 1),
    (r"\textbf{34}", "34", 1), (r"\overline{34}", "34", -1), ("-34", "34", -1), ("\u221234", "-34", 1),
    ("34 or 35", "34", -1), ("33\nAnswer: 34", "34", 1), ("34\nAnswer: 33", "34", -1),
    ("34" + " " * 300, "34", -1), (r"\frac{1}{2}", r"\dfrac{1}{2}", 1), ("a 34", "34", -1),
) + [
    ("34", "34", -1), (r"\boxed{34}", "34", -1), ("answer: 34", "34", 1), ("Answer : 34", "34", 1),
    ("The answer is 34", "34", -1), ("Answer:", "34", -1),
]
QUIZ = {"choices": ["3", "5", "7", "9"]}
GASES = {"choices": ["hydrogen", "lithium", "helium", "neon"]}
GPQA = [
    ("Answer: B", "B", 1), ("Answer: C", "B", 0), ("answer: b", "B", 0), ("Answer: (B)", "B", 1),
    ("Answer: $B$", "B", 1), ("**Answer: B**", "B", 1), ("Answer:\n**B**", "B", 1),
    ("The answer is (B).", "B", 1), (r"\boxed{B}", "B", 1), (r"\boxed{\text{(B)}}", "B", 1),
    (r"\boxed{B", "B", 0), ("B", "B", 1), ("Option B", "B", 1), ("B is correct", "B", 0),
    ("Answer: A, no. Answer: B", "B", 1), ("Answer: A, no. Answer: B", "A", 0),
    ("The answer is C. Option A is wrong.", "C", 1), ("The answer is C. Option A is wrong.", "A", 0),
    ("Answer: B. The other choices are wrong.", "B", 1),
    ("The correct answer is D. Options A, B and C contradict it.", "D", 1), ("**B**", "B", 1),
    ("<answer>B</answer>", "B", 1), ("Answer: A or B", "A", 0), ("Option A is wrong.", "A", 0),
    ("<think>Answer: A</think>Answer: B", "B", 1), ("<think>Answer: B</think>", "B", 0),
    ("I say none of them", "I", 0), ("A good idea", "A", 0), ("Answer: Boron", "B", 0), ("", "B", 0),
    ("Answer: C", "7", 1, QUIZ), ("Answer: B", "7", 0, QUIZ), ("Answer: A", "3", 1, QUIZ),
    ("Answer: C", "2", 1, QUIZ), ("Answer: C", 2, 1, QUIZ), ("Answer: D", 3, 1, QUIZ),
    ("Answer: B", 3, 0, QUIZ), ("Answer: C", "c", 1, QUIZ), ("Answer: C", "helium", 1, GASES),
    ("Answer: B", "helium", 0, GASES), ("It is helium", "helium", 0, GASES), ("Answer: B", 1, 1),
    ("Answer: B", "A", 1, {"correct_letter": "B"}),
]
F1 = [
    ("red", "red", 1.0), ("The red fox!", "red dog", 0.5), ("red red red", "red", 0.5),
    ("blue", "red", 0.0), ("", "red", 0.0), (".", "!", 1.0), ("the", "a", 1.0), ("Red.", "red", 1.0),
    ("yes", "no", 0.0), ("yes", "yes", 1.0), ("yes it is", "yes", 0.5), ("42", "42", 1.0),
    ("U.S.A.", "usa", 1.0), ("well-known", "well known", 0.0), ("an apple a day", "apple day", 1.0),
]
# fmt: on

ROWS: dict[str, list[tuple]] = {
    "math": [*NUMBERS, *EQUATIONS, *COMPLEX, *EXPRESSIONS, *UNITS, *PLACES],
    "deepscaler": DEEPSCALER,
    "dapo": DAPO,
    "gpqa": GPQA,
    "f1": F1,
}
CASES = [
    Case(scorer, *row[:3], row[3] if len(row) > 3 else {})
    for scorer, rows in ROWS.items()
    for row in rows
]
