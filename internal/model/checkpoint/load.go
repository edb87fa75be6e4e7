package checkpoint

import (
	"context"
	"fmt"
	"slices"
	"sort"
)

// Load fills the fields with what a checkpoint holds of a rank's range. The ranks that saved
// may have been any number with any ranges. params are the parameters of the model in its own
// flat space; elements that belong to none (padding) are left as they are. Parameters that do
// not match are all listed in the error. Only the parts of shards that are wanted are read,
// after the checksum of each shard that holds one.
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

// Read fills dst with the elements of one field of one flattened parameter, from offset on.
// What it reads of damaged shards is ErrNotWhole.
func (c *Checkpoint) Read(ctx context.Context, param, field string, offset int64, dst []float32) error {
	if !slices.Contains(c.Manifest.Fields, field) {
		return fmt.Errorf("%s: no field %q; it holds %q", c.Dir, field, c.Manifest.Fields)
	}
	name := tensorName(param, field)
	pieces := c.pieces[name]
	// The pieces are in order and without gaps: the first that ends behind offset holds it.
	at := sort.Search(len(pieces), func(i int) bool { return pieces[i].offset+pieces[i].length > offset })
	for len(dst) > 0 {
		if offset < 0 || at == len(pieces) {
			return fmt.Errorf("%s: %s: element %d is outside the parameter", c.Dir, name, offset)
		}
		p := pieces[at]
		n := min(int64(len(dst)), p.offset+p.length-offset)
		err := again(c.root, func() error {
			t, err := c.tensors(ctx, p.file)
			if err == nil {
				err = t.ReadFloat32(name, dst[:n], offset-p.offset)
			}
			if passing(err) {
				c.drop(p.file)
			}
			return err
		})
		if err != nil && ctx.Err() == nil {
			err = fmt.Errorf("%w: %w", ErrNotWhole, err)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", c.Dir, err)
		}
		dst, offset, at = dst[n:], offset+n, at+1
	}
	return nil
}
