"""Models that pool: `states_model` splits one into a body, which runs like any other model, and a head (`heads`);
`text_pooler` passes each text's states to the head."""
