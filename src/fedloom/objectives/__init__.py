"""What a phase minimises: one value per example, in nats; the engine alone masks, clips, weighs and reduces."""
