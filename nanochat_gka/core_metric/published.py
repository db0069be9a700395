"""CORE's tasks, and the figures that others have published. Nothing here was measured by this project."""

# The 22 tasks whose mean is CORE, in the order of the published tables: examples in the published bundle, and accuracy
# of OpenAI's GPT-2 checkpoints as printed by nanochat's evaluation. GPT-2 124M's are whole numbers of these examples.
# The three larger models were evidently scored on 1,000 examples of the longer tasks (whole thousandths).
GPT2_MODELS = ("GPT-2 124M", "GPT-2 355M", "GPT-2 774M", "GPT-2 1.5B")
GPT2_CORE = (0.113891, 0.184903, 0.214641, 0.256525)
_TASKS = {
    "hellaswag_zeroshot": (10042, 0.308504, 0.390000, 0.440000, 0.502000),
    "jeopardy": (2117, 0.001889, 0.044000, 0.045000, 0.092000),
    "bigbench_qa_wikidata": (20321, 0.282663, 0.428000, 0.480000, 0.531000),
    "arc_easy": (2376, 0.412458, 0.480000, 0.535000, 0.595000),
    "arc_challenge": (1172, 0.221843, 0.262000, 0.264000, 0.299000),
    "copa": (100, 0.600000, 0.660000, 0.670000, 0.670000),
    "commonsense_qa": (1221, 0.224406, 0.196000, 0.270000, 0.227000),
    "piqa": (1838, 0.622960, 0.670000, 0.698000, 0.725000),
    "openbook_qa": (500, 0.278000, 0.308000, 0.318000, 0.346000),
    "lambada_openai": (5153, 0.322919, 0.426000, 0.488000, 0.523000),
    "hellaswag": (10042, 0.307907, 0.395000, 0.444000, 0.512000),
    "winograd": (273, 0.578755, 0.655678, 0.688645, 0.714286),
    "winogrande": (1267, 0.486188, 0.521000, 0.541000, 0.569000),
    "bigbench_dyck_languages": (1000, 0.155000, 0.170000, 0.225000, 0.247000),
    "agi_eval_lsat_ar": (230, 0.226087, 0.230435, 0.256522, 0.273913),
    "bigbench_cs_algorithms": (1320, 0.419697, 0.456000, 0.440000, 0.417000),
    "bigbench_operators": (210, 0.085714, 0.100000, 0.114286, 0.157143),
    "bigbench_repeat_copy_logic": (32, 0.031250, 0.062500, 0.062500, 0.093750),
    "squad": (10570, 0.058278, 0.169000, 0.235000, 0.309000),
    "coqa": (7983, 0.133659, 0.227000, 0.230000, 0.280000),
    "boolq": (3270, 0.552294, 0.606000, 0.567000, 0.619000),
    "bigbench_language_identification": (10000, 0.256600, 0.269000, 0.261000, 0.250000),
}
CORE_TASKS = tuple(_TASKS)
CORE_SIZES = {label: row[0] for label, row in _TASKS.items()}
GPT2_ACCURACY = {label: row[1:] for label, row in _TASKS.items()}

# The paper's table of the centred CORE subset, depth 20, as printed: (nanochat_base, GKA).
PAPER_CENTERED = {
    "hellaswag_zeroshot": (0.2650, 0.2267),
    "copa": (0.3000, 0.3000),
    "openbook_qa": (0.1520, 0.2000),
    "lambada_openai": (0.3627, 0.2750),
    "winograd": (0.3040, 0.2800),
    "winogrande": (0.0671, 0.0900),
}
PAPER_MEAN = (0.2418, 0.2286)
PAPER_TASKS = tuple(PAPER_CENTERED)
# Examples of each task, at most, that these scores come from (None: all). The paper does not say. Of all caps from 20
# to 10,042, 200 alone prints the second column. The first fits 3,122 caps, from 1,326 up: only hellaswag_zeroshot and
# lambada_openai may be cut, and None takes them as whole (a test tries every cap).
PAPER_EXAMPLES = (None, 200)
