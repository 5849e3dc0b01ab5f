"""The product imports parts of vllm-ascend early, for its shims. Nothing else may change by it."""


def test_order_of_imports_changes_nothing_but_the_shims(stack):
    bare, product = (stack.job("imported", order=order) for order in ("bare", "product"))
    both = bare.keys() & product.keys()
    assert len(both) > 20_000
    differ = {name for name in both if bare[name] != product[name]}
    ours = {name for name in differ if "cookbook_npu" in product[name]}
    assert differ - ours == set()
    assert {name.rpartition("vllm")[2] for name in ours}
