"""What the four systems do that mprun unites: a test for each row, named by the row's ID.

`test_complete.ELSEWHERE` lists the rows that tests of other folders prove.

    A   Habana HMP      op lists
    B   torch.amp       autocast, loss scaling, TF32
    C   Keras           dtype policies
    D   PopTorch        true half precision

`test_complete.py` holds that no row is without its test.
"""
