package checkpoint

import (
	"context"
	"fmt"
)

// Load fills the fields with a checkpoint's data of one range, saved by any number of ranks with any ranges. params are
// the parameters of the model in its own flat space; padding elements stay unchanged. The error lists all parameters
// that do not match. Load reads only the needed parts of shards, after verifying their checksums.
func (c *Checkpoint) Load(ctx context.Context, params []Param, want Range, fields ...Field) error {
	if err := checkLayout(params, []Range{want}, fields); err != nil {
		return fmt.Errorf("%s: %w", c.Dir, err)
	}
	if err := compare(params, c.Manifest.Params); err != nil {
		return fmt.Errorf("%s: %w", c.Dir, err)
	}
	for _, p := range params {
		span, err := p.span()
		if err != nil {
			return err
		}
		part := span.overlap(want)
		if part.Len() <= 0 {
			continue
		}
		for _, f := range fields {
			dst := f.Data[part.Lo-want.Lo : part.Hi-want.Lo]
			if err := c.Read(ctx, p.Name, f.Name, part.Lo-span.Lo, dst); err != nil {
				return err
			}
		}
	}
	return nil
}
