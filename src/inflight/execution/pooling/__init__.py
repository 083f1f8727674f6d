"""What a model that pools has besides its layers: `states_model` takes it apart into a body, which runs like any other
model, and a head (`heads`, `poolers`, `dense_files`); `text_pooler` gives the head each text's states."""
