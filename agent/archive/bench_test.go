package archive_test

import (
	"bytes"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/agent/archive"
)

// manyFiles makes n small files, in directories of 50.
func manyFiles(t testing.TB, home string, n int) {
	t.Helper()
	for i := range n {
		name := filepath.Join(home, fmt.Sprintf("d%d/f%d", i/50, i))
		if i%50 == 0 {
			require.NoError(t, os.Mkdir(filepath.Dir(name), 0o755))
		}
		require.NoError(t, os.WriteFile(name, bytes.Repeat([]byte(name+"\n"), 1+i%60), 0o644))
	}
}

func BenchmarkWriteOf5000Files(b *testing.B) {
	h := home(b)
	manyFiles(b, h, 5000)
	for b.Loop() {
		s, err := archive.Write(b.Context(), io.Discard, limits(h))
		require.NoError(b, err)
		b.SetBytes(s.Bytes)
	}
}

func BenchmarkRestoreOf5000Files(b *testing.B) {
	h := home(b)
	manyFiles(b, h, 5000)
	stream, _ := write(b, limits(h))
	for b.Loop() {
		b.StopTimer()
		require.NoError(b, os.RemoveAll(h))
		b.StartTimer()
		s, err := restore(b, stream, limits(h))
		require.NoError(b, err)
		b.SetBytes(s.Bytes)
	}
}

// text writes n bytes that compress about as source code does.
func text(w io.Writer, n int) error {
	words := make([]string, 2000)
	r := rand.New(rand.NewPCG(1, 2))
	for i := range words {
		words[i] = fmt.Sprintf("%x", r.Uint32N(1<<(4+i%28)))
	}
	var line []byte
	for n > 0 {
		line = line[:0]
		for len(line) < 4000 {
			line = append(append(line, words[r.IntN(1+r.IntN(len(words)))]...), ' ')
		}
		part := line[:min(n, len(line))]
		if _, err := w.Write(part); err != nil {
			return err
		}
		n -= len(part)
	}
	return nil
}

func BenchmarkOneLargeFile(b *testing.B) {
	h := home(b)
	f, err := os.Create(filepath.Join(h, "large"))
	require.NoError(b, err)
	require.NoError(b, text(f, 100<<20))
	require.NoError(b, f.Close())
	stream, _ := write(b, limits(h))
	b.Run("write", func(b *testing.B) {
		b.SetBytes(100 << 20)
		for b.Loop() {
			write(b, limits(h))
		}
		b.ReportMetric(float64(len(stream))/(1<<20), "MB_compressed")
	})
	b.Run("restore", func(b *testing.B) {
		b.SetBytes(100 << 20)
		for b.Loop() {
			_, err := restore(b, stream, limits(h))
			require.NoError(b, err)
		}
	})
}
