package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/api/openapi"
)

func TestValuesOfAClaimComeFromFilesAndInput(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	require.NoError(t, os.WriteFile(file, []byte("A=1\r\n # text\n\nB=2=3"), 0o600))
	var claim openapi.NewSandbox
	flags := valueFlags{
		Env: []string{"B=", "C=a,b"}, EnvFile: []string{file}, Secret: []string{"S=-", "F=" + file}, File: []string{file + ":/a:0600", file + ":b"},
	}
	require.NoError(t, flags.into(&claim, strings.NewReader("hidden\n\n")))
	require.Equal(t, map[string]string{"A": "1", "B": "", "C": "a,b"}, claim.EnvVars, "a flag wins over a file")
	require.Equal(t, "hidden\n", claim.Secrets["S"])
	require.Equal(t, []string{"/a", "b"}, []string{claim.Files[0].Path, claim.Files[1].Path})
	require.Equal(t, "0600", *claim.Files[0].Mode)
}

func TestRefusedValuesOfAClaimAreNotShown(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	require.NoError(t, os.WriteFile(file, []byte("A=1\nhidden\n"), 0o600))
	for want, flags := range map[string]valueFlags{
		"line 2: must be NAME=VALUE":               {EnvFile: []string{file}},
		"--env: must be NAME=VALUE":                {Env: []string{"hidden"}},
		"--secret: must be NAME=FILE":              {Secret: []string{"hidden"}},
		"--secret KEY: its file does not exist":    {Secret: []string{"KEY=hidden"}},
		"only one of them can come from":           {Secret: []string{"A=-", "B=-"}},
		"must be SOURCE:PATH or SOURCE:PATH:MODE":  {File: []string{file}},
		"--file: open /no/such: no such file or":   {File: []string{"/no/such:/a"}},
		"--env-file: open /no/such: no such file ": {EnvFile: []string{"/no/such"}},
	} {
		err := flags.into(&openapi.NewSandbox{}, strings.NewReader("hidden"))
		require.ErrorContains(t, err, want)
		require.NotContains(t, err.Error(), "hidden")
	}
}
