"""What tests share: tiny models, oracles written from the equations, hand-made explanations and factors."""
