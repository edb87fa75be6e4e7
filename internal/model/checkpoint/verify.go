package checkpoint

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"

	"golang.org/x/sync/errgroup"
)

// verifyAtOnce is how many shards are hashed in parallel: enough to keep a disk busy, few
// enough to leave a machine usable.
const verifyAtOnce = 4

// Verify reads every shard that was not verified yet and compares its checksum.
func (c *Checkpoint) Verify(ctx context.Context) error {
	g, all := errgroup.WithContext(ctx)
	g.SetLimit(verifyAtOnce)
	for i := range c.shards {
		if c.shards[i].verified {
			continue
		}
		g.Go(func() error {
			return again(nil, func() error { return c.verifyShard(all, i) })
		})
	}
	if err := g.Wait(); err != nil {
		if ctx.Err() == nil {
			err = fmt.Errorf("%w: %w", ErrNotWhole, err)
		}
		return fmt.Errorf("%s: %w", c.Dir, err)
	}
	return nil
}

// verifyShard opens a shard anew to read it.
func (c *Checkpoint) verifyShard(ctx context.Context, i int) error {
	info := c.Manifest.Files[i]
	f, err := c.regular(info.Name)
	if err != nil {
		return err
	}
	_, err = header(f, info) // a moment, where the checksum of what is no shard may take hours
	if err == nil {
		err = verify(ctx, f, info)
	}
	c.shards[i].verified = err == nil
	return errors.Join(err, f.Close())
}

// verify compares the size and the checksum of an open shard with the manifest's.
func verify(ctx context.Context, f file, want FileInfo) error {
	h := sha256.New()
	n, err := io.Copy(&cancelled{ctx: ctx, w: h}, f)
	if err != nil {
		return fmt.Errorf("%s: %w", want.Name, err)
	}
	if n != want.Bytes {
		return fmt.Errorf("%s: %d bytes, the manifest says %d", want.Name, n, want.Bytes)
	}
	if got := hex.EncodeToString(h.Sum(nil)); got != want.SHA256 {
		return fmt.Errorf("%s: checksum %.12s…, the manifest says %.12s…", want.Name, got, want.SHA256)
	}
	return nil
}
