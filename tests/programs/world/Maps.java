import java.util.HashMap;
import java.util.Map;

/** A map of small objects that are replaced at random. Usage: Maps ENTRIES CHANGES */
public class Maps {
    public static void main(String[] arguments) {
        int entries = Integer.parseInt(arguments[0]), changes = Integer.parseInt(arguments[1]);
        Map<Integer, int[]> map = new HashMap<>();
        for (int i = 0; i < entries; i++) map.put(i, new int[] {i, i * 31, i ^ 5, 0, 0, 0});
        long state = 1, sum = 0;
        for (int i = 0; i < changes; i++) {
            state = state * 6364136223846793005L + 1442695040888963407L;
            int key = (int) ((state >>> 33) % entries);
            int[] old = map.get(key);
            sum += old[1];
            map.put(key, new int[] {key, old[1] + i, old[2] ^ i, i, 0, 0});
        }
        for (int[] each : map.values()) sum = sum * 31 + each[2];
        System.out.println(sum);
    }
}
