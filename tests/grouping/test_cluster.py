"""Clusters of answers: by hand, against scikit-learn and literal slow versions, and errors.

Random vectors have no equal distances, so the tree is unique, and all labels and scores must equal scikit-learn's. With
equal distances several trees are valid: each merge must be of a closest pair, the scores must equal scikit-learn's for
the same clusters, and so must the labels where no merge had a choice.

SciPy warns about "ward_rows", which passes distances where features are expected.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import sklearn
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.cluster import hierarchy
from sklearn.cluster import DBSCAN, AgglomerativeClustering
from sklearn.metrics import pairwise, silhouette_score

from groupwise.errors import InputError
from groupwise.grouping.cluster import METHODS, cosine_distances, nested_groups, silhouettes, similarity_groups
from groupwise.grouping.linkage import average_linkage, ward_linkage

pytestmark = pytest.mark.filterwarnings("ignore:The symmetric non-negative hollow observation matrix")

SLOW_SIZES = [pytest.param(size, marks=pytest.mark.slow) for size in (4, 5, 12, 16)]
SIZES = [3, 8, *SLOW_SIZES]  # answers per prompt
KINDS = ((2, np.float64), (3, np.float32), (16, np.float32), (64, np.float64))  # widths and types


@pytest.fixture(autouse=True)
def quick_scikit_learn():
    """Without its parameter checks, which take about half of the time."""
    with sklearn.config_context(assume_finite=True, skip_parameter_validation=True):
        yield


def made_groups(seed, prompts, size, width, dtype):
    """Half of the prompts have answers around a few centres, the others random ones; vectors of different lengths."""
    rng = np.random.default_rng([seed, size, width])
    centres = rng.normal(size=(prompts, 4, width))
    noise = rng.normal(size=(prompts, size, width)) * rng.uniform(0.05, 0.5, size=(prompts, 1, 1))
    around = np.take_along_axis(centres, rng.integers(4, size=(prompts, size, 1)), axis=1) + noise
    vectors = np.where(np.arange(prompts).reshape(-1, 1, 1) % 2, around, rng.normal(size=(prompts, size, width)))
    return (vectors * rng.uniform(0.5, 2, size=(prompts, size, 1))).astype(dtype)


def repeated_groups(seed, prompts, size, width, dtype=np.float64):
    """Answers with repetitions, but never all equal."""
    rng = np.random.default_rng(seed)
    distinct = made_groups(seed, prompts, 6, width, dtype)
    which = rng.integers(rng.integers(2, 7, size=(prompts, 1)), size=(prompts, size))
    which[:, :2] = (0, 1)
    return np.take_along_axis(distinct, rng.permuted(which, axis=1)[..., None], axis=1)


def numbered(labels):
    """Labels from 0 in order of appearance."""
    names = {}
    return [names.setdefault(label, len(names)) for label in labels]


def best_of(size, fit, score, max_groups=7):
    """The labels with the highest score, the fewest clusters on a tie."""
    best, chosen = -math.inf, None
    for number in range(2, min(max_groups, size - 1) + 1):
        labels = fit(number)
        value = score(labels)
        if value > best + 1e-12:
            best, chosen = value, labels
    return numbered(chosen), float(best)


def sklearn_average(distances, max_groups=7):
    def fit(number):
        return AgglomerativeClustering(number, metric="precomputed", linkage="average").fit_predict(distances)

    return best_of(len(distances), fit, lambda x: silhouette_score(distances, x, metric="precomputed"), max_groups)


def sklearn_ward_rows(vectors):
    similarity = pairwise.cosine_similarity(vectors)
    return best_of(
        len(vectors),
        lambda number: AgglomerativeClustering(number).fit_predict(1 - similarity),
        lambda labels: silhouette_score(vectors, labels),
    )


def score_of(distances, labels):
    """scikit-learn's silhouette, 0 where it is undefined."""
    if not 1 < len(set(labels)) < len(labels):
        return 0.0
    return silhouette_score(distances, labels, metric="precomputed")


def circle(*degrees):
    """One prompt with vectors at these angles; their distance is 1 − cos of the difference."""
    angles = torch.tensor(degrees, dtype=torch.float64).deg2rad()
    return torch.stack([angles.cos(), angles.sin()], dim=1).unsqueeze(0)


def check(ours, expected, tolerance=1e-9):
    labels, scores = zip(*expected, strict=True)
    assert ours.labels.tolist() == list(labels)
    np.testing.assert_allclose(ours.scores, scores, rtol=tolerance, atol=tolerance)


def test_by_hand():
    # Distances 1/2 (0–1), 3/2 (1–2) and 2 (0–2). The silhouettes are 3/4, 2/3 and, for the one that is alone, 0.
    vectors = circle(0, 60, 180)
    torch.testing.assert_close(
        cosine_distances(vectors)[0],
        torch.tensor([[0, 0.5, 2], [0.5, 0, 1.5], [2, 1.5, 0]], dtype=torch.float64),
        rtol=1e-12,
        atol=1e-12,
    )
    score = (3 / 4 + 2 / 3) / 3
    check(similarity_groups(vectors), [([0, 0, 1], score)])
    check(similarity_groups(vectors, method="adaptive"), [([0, 0, 1], score)])
    check(similarity_groups(vectors, method="threshold", threshold=0.45), [([0, 0, 1], score)])
    check(similarity_groups(vectors, method="threshold", threshold=0.55), [([0, 1, 2], 0)])
    check(similarity_groups(vectors, method="threshold", threshold=-0.7), [([0, 0, 1], score)])  # the mean is 1.75
    check(similarity_groups(vectors, method="threshold", threshold=-0.8), [([0, 0, 0], 0)])
    check(similarity_groups(vectors, method="dbscan", threshold=0.45), [([0, 0, 1], score)])
    check(similarity_groups(vectors, method="dbscan", threshold=-0.55), [([0, 0, 0], 0)])  # 0–1 and 1–2 are a chain
    check(similarity_groups(vectors, method="dbscan", threshold=0.45, min_samples=3), [([0, 1, 2], 0)])


def test_a_collapsed_prompt_keeps_its_score():
    score = (3 / 4 + 2 / 3) / 3
    for method in ("average", "adaptive"):
        check(similarity_groups(circle(0, 60, 180), method=method, min_silhouette=0.48), [([0, 0, 0], score)])
        check(similarity_groups(circle(0, 60, 180), method=method, min_silhouette=0.47), [([0, 0, 1], score)])


def test_at_the_threshold():
    """As in scikit-learn, average linkage stops at the distance 1 − threshold, and DBSCAN still reaches it."""
    for vectors, threshold in ((torch.eye(3).unsqueeze(0), 0.0), (torch.ones(1, 3, 2), 1.0)):
        check(similarity_groups(vectors, method="threshold", threshold=threshold), [([0, 1, 2], 0)])
        check(similarity_groups(vectors, method="dbscan", threshold=threshold), [([0, 0, 0], 0)])


def test_a_tie_goes_to_fewer_clusters():
    # A triangle with one corner twice. That pair scores 1 and 1, the other corners 0 and 0, apart or together.
    check(similarity_groups(circle(210, 210, 90, 330), method="ward_rows"), [([0, 0, 1, 1], 0.5)])


@pytest.mark.parametrize("size", SIZES)
def test_average_equals_scikit_learn(size):
    for width, dtype in KINDS:
        vectors = made_groups(0, 16, size, width, dtype)
        ours = similarity_groups(vectors, min_silhouette=-1)
        expected = [sklearn_average(pairwise.cosine_distances(x.astype(np.float64))) for x in vectors]
        check(ours, expected)
        collapsed = similarity_groups(vectors, min_silhouette=0.3)
        check(collapsed, [(labels if score >= 0.3 else [0] * size, score) for labels, score in expected])


@pytest.mark.parametrize("size", SIZES)
def test_ward_rows_equals_scikit_learn(size):
    for width, dtype in KINDS:
        vectors = made_groups(1, 16, size, width, dtype)
        ours = similarity_groups(vectors, min_silhouette=-1, method="ward_rows")
        expected = [sklearn_ward_rows(x.astype(np.float64)) for x in vectors]
        check(ours, expected)
        collapsed = similarity_groups(vectors, min_silhouette=0.3, method="ward_rows")
        check(collapsed, [(labels if score >= 0.3 else [0] * size, score) for labels, score in expected])


def test_ward_rows_equals_scikit_learn_in_float32():
    """scikit-learn computes in float32 there, so labels may differ where two cuts score the same up to that."""
    vectors = made_groups(2, 20, 8, 48, np.float32)
    ours = similarity_groups(vectors, min_silhouette=-1, method="ward_rows")
    expected = [sklearn_ward_rows(x) for x in vectors]
    np.testing.assert_allclose(ours.scores, [score for _, score in expected], atol=1e-5)
    same = [a == b for a, (b, _) in zip(ours.labels.tolist(), expected, strict=True)]
    assert sum(same) >= 19


def test_max_groups_equals_scikit_learn():
    vectors = made_groups(3, 20, 9, 6, np.float64)
    for most in (2, 3, 100):
        ours = similarity_groups(vectors, max_groups=most, min_silhouette=-1)
        check(ours, [sklearn_average(pairwise.cosine_distances(x), most) for x in vectors])
        assert int(ours.labels.max()) < most


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow), *SIZES])
def test_threshold_equals_scikit_learn(size):
    counts = set()
    for (width, dtype), threshold in itertools.product(KINDS, (0.9, 0.7, 0.1, -0.3)):
        vectors = made_groups(4, 8, size, width, dtype)
        expected = []
        for x in vectors:
            distances = pairwise.cosine_distances(x.astype(np.float64))
            tree = AgglomerativeClustering(
                n_clusters=None, distance_threshold=1 - threshold, metric="precomputed", linkage="average"
            )
            labels = numbered(tree.fit_predict(distances)) if size > 1 else [0]
            expected.append((labels, score_of(distances, labels)))
            counts.add(max(labels) + 1)
        check(similarity_groups(vectors, method="threshold", threshold=threshold), expected)
    assert {1, size} <= counts


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow), *SIZES])
def test_dbscan_equals_scikit_learn(size):
    for (width, dtype), (threshold, least) in itertools.product(KINDS, ((0.9, 2), (0.7, 3), (0.5, 4), (0.4, 1))):
        vectors = made_groups(5, 8, size, width, dtype)
        expected = []
        for x in vectors:
            distances = pairwise.cosine_distances(x.astype(np.float64))
            labels = DBSCAN(eps=1 - threshold, min_samples=least, metric="precomputed").fit_predict(distances)
            labels = numbered([label if label >= 0 else -1 - place for place, label in enumerate(labels)])
            expected.append((labels, score_of(distances, labels)))
        check(similarity_groups(vectors, method="dbscan", threshold=threshold, min_samples=least), expected)


def test_dbscan_border_answer_joins_the_cluster_of_the_first_core():
    # Neighbours are within 17.5 degrees. The one at 20 has three (3, 37 and itself), so it is no core, but near two.
    low, high, threshold = (0, 1, 2, 3), (37, 38, 39, 40), math.cos(math.radians(17.5))
    for degrees, expected in (
        ((20, *low, *high), [0] * 5 + [1] * 4),
        ((20, *high, *low), [0] * 5 + [1] * 4),
        ((0, *high, 20, 1, 2, 3), [0, 1, 1, 1, 1, 0, 0, 0, 0]),
        ((90, *high, 20, *low), [0, 1, 1, 1, 1, 1, 2, 2, 2, 2]),  # the first is noise
    ):
        vectors = circle(*degrees)
        labels = similarity_groups(vectors, method="dbscan", threshold=threshold, min_samples=4).labels[0].tolist()
        expected_labels = DBSCAN(eps=1 - threshold, min_samples=4, metric="precomputed").fit_predict(
            cosine_distances(vectors)[0]
        )
        assert labels == numbered(expected_labels) == expected


@pytest.mark.parametrize("size", SIZES)
def test_tree_heights_equal_scipy(size):
    for width, dtype in KINDS:
        vectors = torch.from_numpy(made_groups(6, 60, size, width, dtype)).double()
        distances, plain = cosine_distances(vectors), torch.cdist(vectors, vectors)
        for tree, matrix, method in (
            (average_linkage(distances), distances, "average"),
            (ward_linkage(plain), plain, "ward"),
        ):
            upper = [matrix[p][np.triu_indices(size, 1)].numpy() for p in range(len(matrix))]
            expected = [hierarchy.linkage(row, method)[:, 2] for row in upper]
            np.testing.assert_allclose(tree.heights, expected, rtol=1e-9, atol=1e-12)
            assert tree.labels.amax(2).tolist() == [list(range(size - 1, -1, -1))] * len(matrix)


def merges(labels, apart):
    """For each merge of a tree's ``labels`` ``(G, G)``: the distance of its parts, and of every pair of clusters."""
    for before, after in itertools.pairwise(labels.tolist()):
        clusters = [[i for i, x in enumerate(before) if x == label] for label in range(max(before) + 1)]
        joined = [c for c in clusters if sum(after[i] == after[c[0]] for i in range(len(after))) > len(c)]
        assert len(joined) == 2  # and nothing else changed
        assert numbered(before) == before
        yield apart(*joined), sorted(apart(a, b) for a, b in itertools.combinations(clusters, 2))


def test_with_equal_distances_each_merge_is_of_a_closest_pair():
    """Vectors of −1, 0 and 1: zero vectors, equal ones, multiples, and many equal distances."""
    rng = np.random.default_rng(0)
    vectors = rng.integers(-1, 2, size=(30, 8, 3)).astype(np.float64) * rng.integers(1, 3, size=(30, 8, 1))
    distances = cosine_distances(vectors)
    plain = torch.cdist(torch.from_numpy(vectors), torch.from_numpy(vectors))
    average, ward = average_linkage(distances), ward_linkage(plain)
    ours = similarity_groups(vectors, min_silhouette=-1)
    scores = silhouettes(distances, average.labels[:, 1:7])  # 7 to 2 clusters
    with_choice = 0
    for p in range(len(vectors)):

        def mean_apart(a, b, p=p):
            return float(distances[p][a][:, b].mean())

        def error_added(a, b, p=p):
            apart = np.linalg.norm(vectors[p, a].mean(0) - vectors[p, b].mean(0))
            return apart * math.sqrt(2 * len(a) * len(b) / (len(a) + len(b)))

        choices = []
        for heights, labels, apart in (
            (average.heights[p], average.labels[p], mean_apart),
            (ward.heights[p], ward.labels[p], error_added),
        ):
            choice = False
            for height, (taken, pairs) in zip(heights.tolist(), merges(labels, apart), strict=True):
                assert taken == pytest.approx(pairs[0], abs=1e-7)
                assert height == pytest.approx(taken, abs=1e-7)
                choice |= len(pairs) > 1 and pairs[1] < pairs[0] + 1e-7
            choices.append(choice)

        peers = [silhouette_score(distances[p], x, metric="precomputed") for x in average.labels[p, 1:7]]
        np.testing.assert_allclose(scores[p], peers, rtol=1e-9, atol=1e-12)
        best = max(number for number in range(6) if peers[number] >= max(peers) - 1e-12)  # the fewest clusters
        assert ours.labels[p].tolist() == average.labels[p, 1 + best].tolist()
        assert float(ours.scores[p]) == pytest.approx(max(peers), abs=1e-9)
        with_choice += choices[0]
        if not choices[0]:
            assert sklearn_average(distances[p].numpy())[0] == ours.labels[p].tolist()
    assert with_choice >= 15  # the cases have ties


@pytest.mark.parametrize("size", [8, *(pytest.param(size, marks=pytest.mark.slow) for size in (4, 13))])
def test_repeated_answers_equal_scikit_learn(size):
    """Equal answers tie, but a cut between them is never best, so the result is unique."""
    vectors = repeated_groups(7, 16, size, 12)
    ours = similarity_groups(vectors, min_silhouette=-1)
    check(ours, [sklearn_average(cosine_distances(vectors)[p].numpy()) for p in range(len(vectors))])
    # scikit-learn's Euclidean distance of equal vectors is up to 1e-8.
    check(similarity_groups(vectors, min_silhouette=-1, method="ward_rows"), map(sklearn_ward_rows, vectors), 1e-6)
    together = ours.labels.unsqueeze(1) == ours.labels.unsqueeze(2)
    assert bool(together[cosine_distances(vectors) == 0].all())


def adaptive_slowly(distances, most, least_score):
    """Average linkage from its definition, cut at the largest jump."""
    clusters = [[i] for i in range(len(distances))]
    heights, stages = [], [clusters]
    while len(clusters) > 1:
        apart, a, b = min(
            (float(np.mean([distances[i][j] for i in a for j in b])), a, b)
            for a, b in itertools.combinations(clusters, 2)
        )
        clusters = [c for c in clusters if c not in (a, b)] + [sorted(a + b)]
        heights.append(apart)
        stages.append(clusters)
    best, chosen = -math.inf, 0
    for number in range(2, min(most, len(distances) - 1) + 1):
        merged = len(distances) - number
        jump = heights[merged] - heights[merged - 1]
        if jump > best + 1e-12:
            best, chosen = jump, merged
    labels = numbered([next(n for n, c in enumerate(stages[chosen]) if i in c) for i in range(len(distances))])
    score = silhouette_score(distances, labels, metric="precomputed")
    return (labels if score >= least_score else [0] * len(labels)), score


@pytest.mark.parametrize(
    ("most", "least"), [(7, 0.1), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((3, -1.0), (2, 0.3)))]
)
def test_adaptive_equals_its_slow_version(most, least):
    counts = set()
    for size, width in ((3, 2), (6, 4), (9, 16)):
        vectors = made_groups(8, 30, size, width, np.float64)
        ours = similarity_groups(vectors, method="adaptive", max_groups=most, min_silhouette=least)
        distances = cosine_distances(vectors).numpy()
        check(ours, [adaptive_slowly(matrix, most, least) for matrix in distances])
        counts |= set((ours.labels.amax(1) + 1).tolist())
    assert counts >= {(7, 0.1): {1, 2, 3, 4, 5}, (3, -1.0): {2, 3}, (2, 0.3): {1, 2}}[most, least]


@given(
    seed=st.integers(0, 10**6),
    size=st.integers(1, 10),
    width=st.integers(2, 20),
    method=st.sampled_from(METHODS),
    repeats=st.booleans(),
    data=st.data(),
)
def test_the_order_of_the_answers_does_not_matter(seed, size, width, method, repeats, data):
    """For DBSCAN with min_samples = 2, where no answer lies on the border of two clusters."""
    make = repeated_groups if repeats and size > 2 else made_groups
    vectors = make(seed, 2, size, width, np.float64)
    order = data.draw(st.permutations(range(size)))
    ours, moved = similarity_groups(vectors, method=method), similarity_groups(vectors[:, order], method=method)
    assert [numbered(labels) for labels in ours.labels[:, order].tolist()] == moved.labels.tolist()
    np.testing.assert_allclose(ours.scores, moved.scores, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("method", METHODS)
def test_equal_answers_are_one_cluster(method):
    rng = np.random.default_rng(0)
    one = rng.normal(size=(1, 1, 40))
    for vectors in (
        np.repeat(one, 8, axis=1),  # the same answer eight times
        np.repeat(one, 5, axis=1) * np.array([1.0, 2, 3, 1e-3, 1e3]).reshape(1, 5, 1),
        np.zeros((1, 6, 40)),  # empty texts
        one,
        np.repeat(one, 2, axis=1),
        np.repeat(one, 3, axis=1),
    ):
        for least in (0.1, -1.0):
            ours = similarity_groups(vectors, method=method, min_silhouette=least)
            check(ours, [([0] * vectors.shape[1], 0)])


@pytest.mark.parametrize("method", ["average", "ward_rows", "adaptive"])
def test_two_answers_are_one_cluster(method):
    check(similarity_groups(circle(0, 180), method=method, min_silhouette=-1), [([0, 0], 0)])


def test_equidistant_answers_are_one_cluster():
    check(similarity_groups(torch.eye(5).unsqueeze(0)), [([0] * 5, 0)])
    check(similarity_groups(torch.eye(5).unsqueeze(0), method="adaptive"), [([0] * 5, 0)])
    assert similarity_groups(torch.eye(5).unsqueeze(0), min_silhouette=0).labels.unique().tolist() == [0, 1]  # fewest


@pytest.mark.parametrize("method", METHODS)
def test_no_prompts(method):
    vectors = torch.zeros(0, 5, 7)
    ours = similarity_groups(vectors, method=method)
    assert ours.labels.shape == (0, 5)
    assert ours.scores.shape == (0,)
    assert cosine_distances(vectors).shape == (0, 5, 5)
    labels, scores = nested_groups(vectors, levels=4, method=method)
    assert labels.shape == (0, 5, 3)
    assert scores.shape == (0,)


def test_cosine_distances_equal_scikit_learn():
    for size, (width, dtype) in itertools.product((1, 2, 9), KINDS):
        vectors = made_groups(9, 20, size, width, dtype)
        ours = cosine_distances(vectors)
        assert ours.dtype == torch.float64
        expected = [pairwise.cosine_distances(x.astype(np.float64)) for x in vectors]
        np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-9)
        assert torch.equal(ours, ours.transpose(1, 2))
        assert not ours.diagonal(dim1=1, dim2=2).any()
        assert float(ours.min()) >= 0
        assert float(ours.max()) <= 2


def test_cosine_distances_of_zero_equal_and_opposite_vectors():
    x = np.random.default_rng(1).normal(size=(3000, 12))  # some of the cosines round to beyond 1 and −1
    ours = cosine_distances(np.stack([x, -3 * x, 0 * x, x / 7, 0 * x, -0.7 * x], axis=1))
    assert ours[:, [0, 0, 2, 2, 2, 1], [3, 2, 0, 1, 4, 5]].tolist() == [[0, 1, 1, 1, 0, 0]] * 3000
    np.testing.assert_allclose(ours[:, 0, [1, 5]], 2, rtol=1e-12)
    assert float(ours.max()) <= 2


def test_zero_vectors_equal_scikit_learn():
    """With "ward_rows" a zero vector has distance 1 to itself, as in scikit-learn."""
    vectors = made_groups(10, 12, 8, 12, np.float64)
    vectors[:, 2] = 0
    check(similarity_groups(vectors, method="ward_rows", min_silhouette=-1), map(sklearn_ward_rows, vectors))
    vectors = abs(vectors)  # no distance is above 1, so that the zero vector is not tied between clusters
    check(similarity_groups(vectors, min_silhouette=-1), map(sklearn_average, cosine_distances(vectors).numpy()))


@pytest.mark.parametrize("method", METHODS)
def test_dtype_and_scale_of_the_vectors_do_not_matter(method):
    vectors = torch.from_numpy(made_groups(11, 20, 8, 16, np.float32)).bfloat16()
    exact = vectors.double().numpy()
    expected = similarity_groups(exact, method=method)
    read_only, reversed_in_memory = exact.copy(), exact[::-1].copy()[::-1]
    read_only.flags.writeable = False
    single = exact.astype(np.float32)
    for same_vectors in (vectors, vectors.float().requires_grad_(), single, single.astype(">f4"), read_only):
        ours = similarity_groups(same_vectors, method=method)
        assert torch.equal(ours.labels, expected.labels)
        assert torch.equal(ours.scores, expected.scores)
        assert ours.labels.dtype == torch.int64
        assert not ours.scores.requires_grad
    for same_vectors in (exact * 2.0**900, exact * 2.0**-900, reversed_in_memory):
        ours = similarity_groups(same_vectors, method=method)
        assert torch.equal(ours.labels, expected.labels)
        torch.testing.assert_close(ours.scores, expected.scores, rtol=1e-12, atol=1e-12)


def nested_slowly(vectors, levels, settings):
    """The labels ``(G, levels − 1)`` of one prompt, cluster by cluster."""
    labels = similarity_groups(vectors[None], **settings).labels[0] if len(vectors) > 2 else torch.zeros(len(vectors))
    columns = [labels.tolist()]
    if levels > 2:
        below = [[0] * (levels - 2) for _ in labels]
        for label in labels.unique():
            members = (labels == label).nonzero().squeeze(1).tolist()
            for member, row in zip(members, nested_slowly(vectors[members], levels - 1, settings), strict=True):
                below[member] = row
        columns += [list(column) for column in zip(*below, strict=True)]
    return [list(row) for row in zip(*columns, strict=True)]


def test_nested_by_hand():
    # Two sides: two interleaved pairs, and three similar answers.
    vectors = circle(0, 180, 40, 0.1, 180.2, 40.1, 180.1)
    labels, scores = nested_groups(vectors, levels=3, max_groups=2, min_silhouette=0.7)
    assert labels[0].tolist() == [[0, 0], [1, 0], [0, 1], [0, 0], [1, 0], [0, 1], [1, 0]]
    first = similarity_groups(vectors, max_groups=2, min_silhouette=0.7)
    assert torch.equal(nested_groups(vectors, max_groups=2, min_silhouette=0.7)[0], first.labels.unsqueeze(2))
    assert torch.equal(scores, first.scores)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("levels", [*(pytest.param(levels, marks=pytest.mark.slow) for levels in (2, 3)), 4])
def test_nested_equals_its_slow_version(levels, method):
    settings = {"method": method, "max_groups": 3, "threshold": 0.3}
    vectors = made_groups(12, 12, 14, 6, np.float64)
    labels, scores = nested_groups(vectors, levels=levels, **settings)
    assert labels.tolist() == [nested_slowly(x, levels, settings) for x in vectors]
    assert torch.equal(scores, similarity_groups(vectors, **settings).scores)
    if method == "average":
        assert bool((labels.amax(dim=(0, 1)) > 0).all())  # each level cut something
    if method == "threshold":
        assert not labels[:, :, 1:].any()


@pytest.mark.parametrize(
    ("embeddings", "message"),
    [
        (torch.zeros(4, 3), r"shape \(4, 3\); expected \(P, G, D\)"),
        (torch.zeros(2, 0, 3), r"shape \(2, 0, 3\).*G and D at least 1"),
        (torch.zeros(2, 3, 0), r"shape \(2, 3, 0\).*G and D at least 1"),
        (torch.zeros(2, 3, 4, dtype=torch.int64), "floating-point numbers, got torch.int64"),
        (np.zeros((2, 3, 4), dtype=complex), "floating-point numbers, got complex128"),
        ([[[1.0]]], "a tensor or a NumPy array of floating-point numbers, got list"),
    ],
    ids=["rank", "answers", "width", "integers", "complex", "list"],
)
def test_invalid_embeddings(embeddings, message):
    for function in (similarity_groups, cosine_distances, nested_groups):
        with pytest.raises(InputError, match=message):
            function(embeddings)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf], ids=str)
def test_non_finite_embeddings(number):
    vectors = torch.ones(5, 4, 70)
    vectors[3, 2, 65] = number
    for same_vectors in (vectors, vectors.numpy()):
        with pytest.raises(InputError, match=r"answer 2 to prompt 3 .* has NaN or inf"):
            similarity_groups(same_vectors)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "avarage"}, "unknown method 'avarage'; did you mean 'average'"),
        ({"max_groups": 1}, "max_groups must be an integer of at least 2, got 1"),
        ({"max_groups": 2.5}, "max_groups must be an integer of at least 2, got 2.5"),
        ({"min_samples": 0}, "min_samples must be an integer of at least 1, got 0"),
        ({"min_samples": True}, "min_samples must be an integer of at least 1, got True"),
        ({"threshold": 1.5}, "threshold must be a number from -1 to 1, got 1.5"),
        ({"min_silhouette": math.nan}, "min_silhouette must be a number from -1 to 1, got nan"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_invalid_settings(settings, message):
    for function in (similarity_groups, nested_groups):
        with pytest.raises(InputError, match=message):
            function(torch.ones(2, 5, 3), **settings)


def test_levels_must_be_at_least_two():
    with pytest.raises(InputError, match="levels must be an integer of at least 2, got 1"):
        nested_groups(torch.ones(2, 5, 3), levels=1)
