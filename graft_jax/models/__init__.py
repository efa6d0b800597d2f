"""The target model as pure functions of parameter pytrees."""
